"""Records a model as fused launches, and compares these with the model's layers."""

from ....layers.recording import RecordedAttention, Rows, record
from ....models.loading import LoadedModel
from ....models.registry import Model
from ....models.spec import ModelSpec
from ....triton_kernels.fused_linear_settings import FEW_ROWS, TILE_ROWS
from ...parts import DeviceParts
from ..comparison import difference_from_layers, first_step
from ..form import NoForm
from .fused import FusedBody
from .recording import LaunchRecording, is_whole

COMPARED_TOKENS = (1, 5)           # products fused for more rows, up to FEW_ROWS, are fused for one row too


def make_fused_body(parts: DeviceParts, loaded: LoadedModel, spec: ModelSpec, num_rows: int) -> FusedBody:
    """Return the fused launches of a model's forward, after a check that their results agree with those of the layers.

    They include the model's head if the head can be recorded.

    spec       the model's spec with the effective windows
    num_rows   number of rows of the largest generation step
    Mutates    block 0 of the KV cache pool, used for the comparison
    Raises     NotRecordableError, or NoForm if the results differ from those of the layers
    """
    from ....triton_kernels.device_limits import device_limits  # it imports triton

    attention = parts.attention
    recording, gives_logits = record_launches(loaded, spec, getattr(attention, "norms_heads", False))
    fused = FusedBody(recording, loaded.device, device_limits(), gives_logits=gives_logits)
    tokens_per_block = min(parts.tokens_per_block, spec.max_position_embeddings)
    for count in compared_tokens(fused, num_rows):
        if difference := difference_from_layers(
                loaded, attention, parts.uploads.send, first_step(count, spec.vocab_size, tokens_per_block), fused.run,
                gives_logits=gives_logits):
            raise NoForm(difference, is_wrong=True)
    return fused


def compared_tokens(fused: FusedBody, num_rows: int) -> list[int]:
    """Return the token counts of the steps on which `make_fused_body` compares the launches with the layers.

    These steps compile every kernel variant of steps of up to `num_rows` rows. Beyond FEW_ROWS rows, launch settings
    change with the number of row tiles, so one step is compared for each number of row tiles.
    """
    tiled = [count for count in fused.row_counts if count > FEW_ROWS and count - TILE_ROWS < num_rows]
    return [*COMPARED_TOKENS, *(tiled if num_rows > FEW_ROWS else ())]


def record_launches(loaded: LoadedModel, spec: ModelSpec, norms_heads: bool = False) -> tuple[LaunchRecording, bool]:
    """Record a model's forward, and its head if possible. Returns the recording, and whether it includes the head.

    norms_heads   whether the attention norms heads itself; see attention/interface.py

    Raises NotRecordableError if the forward cannot be recorded.
    """
    recorded = RecordedAttention((spec.num_heads, spec.num_kv_heads, spec.head_size), spec.attention, 0, norms_heads)
    recording = record(loaded.model.forward, spec.hidden_size, loaded.dtype, recorded, make=LaunchRecording)
    return recording, _record_head(loaded.model, recording)


def _record_head(model: Model, recording: LaunchRecording) -> bool:
    """Add the model's head to the recording of its forward. Returns False, and adds nothing, if this is impossible."""
    num_operations, num_registers = len(recording.operations), len(recording.widths)
    try:
        logits = model.logits(Rows(recording, recording.result, 0, recording.widths[recording.result]))
    except Exception:                       # it cannot be recorded: an unknown operation, or one that needs tensors
        logits = None
    if isinstance(logits, Rows) and is_whole(logits, recording.widths) and logits.register >= num_registers:
        recording.result = logits.register
        return True
    del recording.operations[num_operations:], recording.widths[num_registers:]
    return False
