"""Makes the forms of an engine. The only file that knows all of them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ...contained_log import log
from ...decoding.logits_stage import LogitsStage
from ...errors import ConfigError, type_name
from ...layers.recording import NotRecordableError, record_embedding
from ...models.loading import LoadedModel
from ...models.registry import Model
from ...models.spec import ModelSpec
from .. import packing
from ..device.running import CapturedGraph, first_line, is_out_of_memory
from ..kv_pool import clear_block
from ..model_check import CheckedModel
from ..packing import Divide
from ..parts import DeviceParts
from ..thread_count import has_openmp
from ..warm_up import cached_by_a_long_sequence, launch, warm_up
from .compiled.making import make_compiled
from .fixed.form import FixedForm
from .fixed.fused import FusedBody
from .fixed.inputs import FixedInputs, can_bind
from .fixed.launches import Launches
from .fixed.making import make_fused_body
from .fixed.shapes import NO_SIZES, largest_shapes
from .form import Forms, NoForm, StepForm, by_reason
from .graph.check import difference_of_graphs
from .graph.form import WITHOUT_GRAPHS, GraphForm, capture
from .packed.form import CallsForm, LayersForward, LayersHead
from .packed.forwards import PaddedForward

# Form -> (warning with the reason, if the form computes something else or a capture fails; option that asks for the
# form; expectation; way out).
ABSENT = {
    "fused": ("steps are not fused: %s", "", "", ""),
    "compiled": ("steps run in torch: %s", "cpu_compile", "compiled steps need a model built from batch_manager.layers",
                 "leave cpu_compile unset to run steps in torch"),
    "graph": (WITHOUT_GRAPHS, "cuda_graphs", "a graph must compute what its kernels compute",
              "leave cuda_graphs unset to launch kernels one by one"),
}


def make_forms(parts: DeviceParts, loaded: LoadedModel, spec: ModelSpec, layout: Divide, absent: Mapping[str, str], *,
               most_rows: int, graph_sizes: frozenset[tuple[int, int]] = NO_SIZES, sink: int = 0,
               own_stages: Sequence[LogitsStage] = (), must: Sequence[str] = (),
               graph: Callable[..., Any] = CapturedGraph) -> Forms:
    """Run the warm-up, and return the forms of an engine, each compared with the model's layers.

    spec          the model's spec with the effective windows
    layout        a function of packing.py, which divides a step into calls of the model
    absent        name -> reason for each form that is not wanted, see wanted.py
    most_rows     number of rows of the largest generation step
    graph_sizes   sizes (generation rows, context tokens) of the steps with contexts for which graphs are captured
    sink          number of sink tokens of the attention
    own_stages    the user's stages
    must          names of forms without which the engine is refused
    graph         CapturedGraph, or a class with its methods
    Mutates       the KV cache pool, which is zeroed again
    Raises        ConfigError
    """
    model, absent = loaded.model, dict(absent)
    if "fixed" not in absent and not can_bind(parts.attention):
        reason = f"{type_name(parts.attention)} cannot read its inputs at fixed addresses"
        absent |= {name: absent.get(name, reason) for name in ("graph", "fused", "fixed")}
    inputs = None if "fixed" in absent else FixedInputs(parts, largest_shapes(parts.num_slots, graph_sizes))
    table = record_embedding(model.embed)

    def launched(model: Model, fused: FusedBody | None = None) -> tuple[Launches | None, list[StepForm]]:
        """Return the launches at fixed addresses, and the forms that make them."""
        if inputs is None:
            return None, []
        launches = Launches(parts, inputs, model, table, fused)
        forms: list[StepForm] = [FixedForm("fixed", parts, inputs, launches)]
        if fused is not None:
            forms.insert(0, FixedForm("fused", parts, inputs, launches, fused.most_rows))
        return launches, forms

    def called(model: Model, compiled: Any = None) -> list[StepForm]:
        """Return the forms that call the model. `compiled` is the result of `make_compiled`."""
        forward, head = layers = LayersForward(model, parts.attention), LayersHead(model)
        if compiled is not None:
            forward, head = compiled[0], compiled[1] or head
        if layout is packing.padded:
            return [CallsForm("padded", parts, model, PaddedForward(model, parts.attention, forward), head, layout)]
        packed = CallsForm("packed", parts, model, *layers, layout)
        if compiled is None:
            return [packed]
        # The rest is little work, and idle threads of torch would spin on the cores of the compiled code.
        return [CallsForm("compiled", parts, model, forward, head, layout, threads=1 if has_openmp() else None), packed]

    checked = CheckedModel(model, parts.vocab_size, spec.hidden_size, loaded.dtype)
    warm_up(parts, Forms([*launched(checked)[1], *called(checked)], parts, {}), own_stages)
    tried = partial(attempt, absent, model, must)
    launches, fixed = launched(model, tried("fused", lambda: make_fused_body(parts, loaded, spec, most_rows)))
    calls = called(model, tried("compiled", lambda: make_compiled(parts, loaded, spec, sink)))
    clear_block(parts.pool, 0)
    others = Forms([*fixed, *calls], parts, {})
    graphs = tried("graph", lambda: make_graph(parts, inputs, launches, others, graph_sizes, graph))
    forms = Forms([*([] if graphs is None else [graphs]), *fixed, *calls], parts, absent)
    log.info("the forms of steps are %s", "; ".join([
        ", ".join(forms.steps), *(f"without {line}" for line in by_reason(absent))]))
    return forms


def attempt(absent: dict[str, str], model: Model, must: Sequence[str], name: str, make: Callable[[], Any]) -> Any:
    """Return the result of `make`; None, and a reason in `absent`, if the form is not wanted or cannot be made.

    must     names of forms without which the engine is refused
    Raises   ConfigError
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
    message, option, expectation, way_out = ABSENT[name]
    absent[name] = reason = (f"{type_name(model)} cannot be compiled: " if name == "compiled" else "") + reason
    if name in must:
        raise ConfigError(f"{option} is True, but {reason}", expectation, way_out)
    if is_wrong:
        log.warning(message, reason)
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
