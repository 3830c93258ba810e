"""The table of forms: what asks for each form of a step, what is in its way, and how it is made.

Only this file knows all forms. `wanted_forms` reads the table before anything is loaded, `make_forms` afterwards.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...config import TrtGptModelOptionalParams
from ...contained_log import log
from ...decoding.logits_stage import LogitsStage
from ...errors import ConfigError, type_name
from ...layers.recording import NotRecordableError, record_embedding
from ...loading_thread import check_interruption
from ...models.loading import LoadedModel
from ...models.registry import Model
from ...models.spec import ModelSpec
from ...triton_kernels.cpu.native.library import CannotCompileError, load_library
from .. import packing
from ..device.running import CapturedGraph, first_line, is_out_of_memory
from ..kv_pool import clear_block
from ..model_check import CheckedModel
from ..packing import Divide
from ..parts import DeviceParts
from ..thread_count import has_openmp
from ..warm_up import cached_by_a_long_sequence, launch, warm_up
from .compiled.forward import make_compiled
from .fixed.form import FixedForm, has_adapter_tiles
from .fixed.fused import FusedBody, make_fused_body
from .fixed.inputs import FixedInputs, can_bind
from .fixed.launches import Launches
from .fixed.shapes import NO_SIZES, largest_shapes
from .form import Forms, NoForm, StepForm, by_reason
from .graph.check import difference_of_graphs
from .graph.form import WITHOUT_GRAPHS, GraphForm, capture
from .packed.form import CallsForm, LayersForward, LayersHead
from .packed.forwards import PaddedForward

LARGEST_BLOCK, BLOCK_UNIT = 256, 16             # tokens per block, of compiled code


class Asked(NamedTuple):
    """What decides about the forms of an engine before anything is loaded.

    layout          a function of packing.py, which divides a step into calls of the model
    has_triton      whether the operations on the device are Triton kernels
    has_attention   whether Parts.attention is set
    graph           CapturedGraph, or a class with its methods and its device type
    num_ranks       number of processes that run the model together
    """

    params: TrtGptModelOptionalParams
    device: torch.device
    layout: Divide
    has_triton: bool
    has_attention: bool = False
    graph: Any = CapturedGraph
    num_ranks: int = 1


class Row(NamedTuple):
    """What is said about a form that an engine lacks.

    option     False rules the form out; with True, an engine without the form is refused. "": there is no option
    needs      what the form needs of options and device, for the refusal
    computes   what it needs of the model, for the refusal
    way_out    of the refusal
    warning    of the log, with the reason, if the form computes something else or a capture fails
    """

    option: str = ""
    needs: str = ""
    computes: str = ""
    way_out: str = ""
    warning: str = ""


FORMS: Mapping[str, Row] = {
    "graph": Row("cuda_graphs", "graphs need a GPU with triton and the package's own attention, without "
                 "TrtGptModelType.V1", "a graph must compute what its kernels compute",
                 "leave cuda_graphs unset to launch kernels one by one", WITHOUT_GRAPHS),
    "fused": Row(warning="steps are not fused: %s"),
    "fixed": Row(),
    "compiled": Row("cpu_compile", "compiled steps need a CPU, a C compiler and the package's own attention",
                    "compiled steps need a model built from batch_manager.layers",
                    "leave cpu_compile unset to run steps in torch", "steps run in torch: %s"),
    "packed": Row(),
    "padded": Row(),
}


def _no_triton(asked: Asked) -> str:
    if asked.has_triton:
        return ""
    return f"the device is {asked.device}" if asked.device.type == "cpu" else "triton is not installed"


def _block_size(asked: Asked) -> str:
    block = asked.params.kv_cache_config.tokens_per_block
    if block % BLOCK_UNIT == 0 and block <= LARGEST_BLOCK:
        return ""
    return f"tokens_per_block is {block}, not a multiple of {BLOCK_UNIT} up to {LARGEST_BLOCK}"


def _no_compiler(asked: Asked) -> str:
    """Build the library of compiled code, if this was not done before."""
    try:
        load_library(check_interruption)
    except CannotCompileError as error:
        return str(error)
    return ""


# Word -> (the forms in whose way it is, the function that returns the reason, or "" if it is not there). A form is
# absent for its first reason in this order; the functions after it are not called.
OBSTACLES: Mapping[str, tuple[Sequence[str], Callable[[Asked], str]]] = {
    "ranks": (["graph", "fused", "fixed"], lambda asked: (
        f"{asked.num_ranks} ranks exchange hidden states between layers" if asked.num_ranks > 1 else "")),
    "no GPU": (["graph"], lambda asked: (
        "" if asked.device.type == asked.graph.device_type else f"the device is {asked.device}")),
    "GPU": (["compiled"], lambda asked: "" if asked.device.type == "cpu" else f"the device is {asked.device}"),
    "no triton": (["graph", "fused"], _no_triton),
    "no kernels": (["fixed"], lambda asked: "" if asked.has_attention else _no_triton(asked)),      # it may bind
    "triton": (["compiled"], lambda asked: "TRITON_INTERPRET is set" if asked.has_triton else ""),
    "deterministic": (["fused"], lambda asked: (               # its products have tiles by the number of rows
        "deterministic is set" if asked.params.deterministic else "")),
    "own attention": (["graph", "compiled"], lambda asked: (
        "Parts.attention is set" if asked.has_attention else "")),
    "V1": (["graph", "fused", "fixed", "packed"], lambda asked: (
        "TrtGptModelType.V1 pads steps to their static batch" if asked.layout is packing.padded else "")),
    "not V1": (["padded"], lambda asked: (
        "" if asked.layout is packing.padded else "TrtGptModelType.V1 alone pads steps")),
    "block size": (["compiled"], _block_size),
    "no compiler": (["compiled"], _no_compiler),
}


def wanted_forms(asked: Asked) -> dict[str, str]:
    """Return name -> reason for each form that the engine will not have. It wants all other forms.

    Builds the library of compiled code if the engine wants `compiled`.

    Raises   ConfigError if cuda_graphs or cpu_compile is True and rules this out
    """
    absent = {}
    for name, row in FORMS.items():
        if row.option and getattr(asked.params, row.option) is False:
            absent[name] = f"{row.option} is False"
            continue
        for word, (forms, reason_of) in OBSTACLES.items():
            if name in forms and (reason := reason_of(asked)):
                refuse_if_asked(asked.params, name, reason, row.needs)
                if word == "no compiler":
                    log.warning("steps run in torch, and the engine is 2 to 27 times slower than with compiled steps: "
                                "%s", reason)
                absent[name] = reason
                break
    return absent


def refuse_if_asked(params: TrtGptModelOptionalParams, name: str, reason: str, expectation: str) -> None:
    """Raise ConfigError if an option asks for the form, which an engine lacks for `reason`."""
    option = FORMS[name].option
    if option and getattr(params, option):
        raise ConfigError(f"{option} is True, but {reason}", expectation, FORMS[name].way_out)


def make_forms(asked: Asked, absent: Mapping[str, str], parts: DeviceParts, loaded: LoadedModel, spec: ModelSpec, *,
               most_rows: int, graph_sizes: frozenset[tuple[int, int]] = NO_SIZES, sink: int = 0,
               own_stages: Sequence[LogitsStage] = ()) -> Forms:
    """Run the warm-up, and return the forms of an engine, each compared with the model's layers.

    absent        name -> reason for each form that is not wanted, a result of `wanted_forms`
    spec          the model's spec with the effective windows
    most_rows     number of rows of the largest generation step
    graph_sizes   sizes (generation rows, context tokens) of the steps with contexts for which graphs are captured
    sink          number of sink tokens of the attention
    own_stages    the user's stages
    Mutates       the KV cache pool, which is zeroed again
    Raises        ConfigError
    """
    model, absent = loaded.model, dict(absent)
    if "fixed" not in absent and not can_bind(parts.attention):
        reason = f"{type_name(parts.attention)} cannot read its inputs at fixed addresses"
        absent |= {name: absent.get(name, reason) for name in ("graph", "fused", "fixed")}
    if any(spec.experts):                                  # their products have as many rows as chose an expert
        reason = f"the layers of {type_name(model)} have experts"
        for name in ("graph", "fused", "fixed"):
            if name not in absent:
                refuse_if_asked(asked.params, name, reason, "launches at fixed addresses have no rows by expert")
                absent[name] = reason
    inputs = None if "fixed" in absent else FixedInputs(parts, largest_shapes(
        parts.num_slots, graph_sizes, has_adapter_tiles(parts)))
    table = record_embedding(model.embed)

    def assemble(model: Model, fused: FusedBody | None = None, compiled: Any = None
                 ) -> tuple[list[StepForm], Launches | None]:
        """Return forms in their order, and the launches at fixed addresses. `compiled` is made by `make_compiled`."""
        forms: list[StepForm] = []
        launches = None if inputs is None else Launches(parts, inputs, model, table, fused)
        if fused is not None:
            forms.append(FixedForm("fused", parts, inputs, launches, fused.most_rows))
        if launches is not None:
            forms.append(FixedForm("fixed", parts, inputs, launches))
        forward, head = layers = LayersForward(model, parts.attention, parts.adapters), LayersHead(model)
        if compiled is not None:
            forward, head = compiled[0], compiled[1] or head
        calls = partial(CallsForm, parts=parts, model=model, divide=asked.layout)
        only_compiled = compiled is not None and asked.params.deterministic      # other forms give other bits
        if asked.layout is packing.padded:
            if not only_compiled:
                forward = PaddedForward(model, parts.attention, forward)
            return [*forms, calls("padded", forward=forward, head=head)], launches
        if compiled is not None:
            # Beside a compiled head, the rest is little work, and idle threads of torch would spin on its cores.
            is_little = has_openmp() and compiled[1] is not None
            forms.append(calls("compiled", forward=forward, head=head, threads=1 if is_little else None))
        if only_compiled:
            absent.setdefault("packed", "deterministic is set, and `compiled` serves every batch")
            return forms, launches
        return [*forms, calls("packed", forward=layers[0], head=layers[1])], launches

    checked = CheckedModel(model, parts.vocab_size, spec.hidden_size, loaded.dtype)
    warm_up(parts, Forms(assemble(checked)[0], parts, {}), own_stages)
    tried = partial(attempt, absent, model, asked.params)
    forms, launches = assemble(model, tried("fused", lambda: make_fused_body(parts, loaded, spec, most_rows)),
                               tried("compiled", lambda: make_compiled(parts, loaded, spec, sink)))
    clear_block(parts.pool, 0)
    others = Forms(forms, parts, {})
    if graphs := tried("graph", lambda: make_graph(parts, inputs, launches, others, graph_sizes, asked.graph)):
        forms.insert(0, graphs)
    made = Forms(forms, parts, absent)
    log_forms(made)
    return made


def log_forms(forms: Forms) -> None:
    log.info("the forms of steps are %s", "; ".join([
        ", ".join(forms.steps), *(f"without {line}" for line in by_reason(forms.absent))]))


def attempt(absent: dict[str, str], model: Model, params: TrtGptModelOptionalParams, name: str,
            make: Callable[[], Any]) -> Any:
    """Return the result of `make`; None, and a reason in `absent`, if the form is not wanted or cannot be made.

    Raises ConfigError if an option asks for the form.
    """
    if name in absent:
        return None
    is_wrong = True
    try:
        return make()
    except (NotRecordableError, NoForm) as obstacle:
        reason, is_wrong = str(obstacle), getattr(obstacle, "is_wrong", False)
    except Exception as error:
        # Launches one by one need less memory and other kernels. An error of the device is not survived.
        if name != "fused" or not is_out_of_memory(error) and not type(error).__module__.startswith("triton"):
            raise
        reason = first_line(error)
    absent[name] = reason = (f"{type_name(model)} cannot be compiled: " if name == "compiled" else "") + reason
    refuse_if_asked(params, name, reason, FORMS[name].computes)
    if is_wrong:
        log.warning(FORMS[name].warning, reason)
    return None


def make_graph(parts: DeviceParts, inputs: FixedInputs, launches: Launches, others: Forms,
               sizes: frozenset[tuple[int, int]], graph: Callable[..., Any]) -> GraphForm:
    """Capture graphs, and compare steps that replay them with the same steps launched kernel by kernel.

    others    forms that serve any batch
    sizes     sizes (generation rows, context tokens) of the steps with contexts for which graphs are captured
    graph     CapturedGraph, or a class with its methods
    Mutates   the KV cache pool, which is zeroed
    Raises    NoForm if a capture fails or a replay has other results
    """
    try:
        form = capture(parts, inputs, launches, sizes, graph)
        difference = difference_of_graphs(
            lambda batch: launch(parts, others, batch), Forms([form], parts, {}),
            Forms([form.with_launches(launches.launch)], parts, {}), parts,
            long_blocks=cached_by_a_long_sequence(parts) // parts.tokens_per_block + 1)
    finally:
        parts.pool.zero_()
    if difference:
        raise NoForm(difference, is_wrong=True)
    return form
