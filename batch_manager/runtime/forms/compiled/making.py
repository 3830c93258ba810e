"""Makes the compiled form of a model's forward and head, and compares the forward with the model's layers."""

import torch

from ....contained_log import log
from ....errors import counted
from ....layers.recording import NotRecordableError, RecordedAttention, record, record_head
from ....models.loading import LoadedModel
from ....models.spec import ModelSpec
from ....triton_kernels.cpu.native.library import TYPES
from ...packing import ModelCall
from ...parts import DeviceParts
from ..comparison import difference_from_layers, first_step
from ..form import NoForm
from .forward import CompiledForward, CompiledHead
from .thread_governor import ThreadGovernor

COMPARED_TOKENS = 5
LARGEST_HEAD = 256                 # of compiled code


def obstacle_of_model(spec: ModelSpec, dtype: torch.dtype) -> str:
    """Return why no model of this spec and data type runs as compiled code; "" if it may."""
    if dtype not in TYPES:
        return f"it computes in {dtype}, not in {' or '.join(map(str, TYPES))}"
    if spec.head_size > LARGEST_HEAD:
        return f"its head_size is {spec.head_size}, above {LARGEST_HEAD}"
    return ""


def make_compiled(parts: DeviceParts, loaded: LoadedModel, spec: ModelSpec, sink: int
                  ) -> tuple[CompiledForward, CompiledHead | None]:
    """Return the compiled form of a model's forward, after a check that its results on one step agree with the layers'.

    The second value is the compiled head; None: the head does more than multiply, and is not compiled.

    spec      the model's spec with the effective windows
    sink      number of sink tokens of the attention
    Mutates   block 0 of the KV cache pool, used for the comparison
    Raises    NotRecordableError, or NoForm if the results differ from those of the layers
    """
    if obstacle := obstacle_of_model(spec, loaded.dtype):
        raise NotRecordableError(obstacle)
    threads = parts.num_threads or torch.get_num_threads()
    recorded = RecordedAttention((spec.num_heads, spec.num_kv_heads, spec.head_size), spec.attention, sink)
    recording = record(loaded.model.forward, spec.hidden_size, loaded.dtype, recorded)
    matrix = record_head(loaded.model.logits, spec.hidden_size, loaded.dtype)
    governor = ThreadGovernor(threads)
    forward = CompiledForward(recording, parts.pool, spec.num_heads, governor, parts.adapters)
    num_tokens = min(COMPARED_TOKENS, parts.tokens_per_block, spec.max_position_embeddings)
    step = first_step(num_tokens, spec.vocab_size, num_tokens)

    def difference() -> str:
        return difference_from_layers(
            loaded, parts.attention, parts.uploads.send, step,
            lambda hidden, positions, _: forward.run(ModelCall(step), hidden.to(loaded.dtype), positions, ()),
            gives_logits=False)

    found = difference()
    if not found and parts.adapters is not None:
        with parts.adapters.trying():
            parts.adapters.plan(step)
            with parts.adapters.active():
                found = difference()
        found = found and f"with a made-up adapter, {found}"
    if found:
        raise NoForm(found, is_wrong=True)
    log.info("steps run as compiled code on at most %s; torch runs the rest of a step", counted(threads, "thread"))
    return forward, None if matrix is None else CompiledHead(matrix, governor)
