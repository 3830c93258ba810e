"""Makes the fused step of a model and compares it with the model itself."""

import numpy as np
import torch

from ....attention.interface import Attention, PackedStep
from ....errors import counted
from ....layers.recording import NotRecordableError, RecordedAttention, Rows, record
from ....models.loading import LoadedModel
from ....models.registry import Model
from ....models.spec import ModelSpec
from ....triton_kernels.fused_linear_settings import FEW_ROWS, TILE_ROWS
from ...device.running import Uploads
from ..comparison import describe_difference, first_step
from .fused import FusedStep
from .recording import LaunchRecording, is_whole

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
COMPARED_TOKENS = (1, 5)           # products fused for more rows, up to FEW_ROWS, are fused for one row too
COMPARED_AT_ONCE = 16              # rows of results; more take too much memory


class WrongStepError(NotRecordableError):
    """The results of the fused step differ from those of the model."""


def make_fused_step(loaded: LoadedModel, spec: ModelSpec, attention: Attention, uploads: Uploads,
                    tokens_per_block: int, num_rows: int) -> FusedStep:
    """Return the fused form of a model's forward, after a check that its results agree with those of the model.

    The fused step includes the model's head if the head can be recorded.

    spec       the model's spec with the effective windows: in each layer, the smaller of the model's and the
               configured window; see attention/windows.py
    num_rows   number of rows of the largest generation step
    Mutates    block 0 of the KV cache pool, used for the comparison
    Raises     NotRecordableError, with the reason why the model cannot be fused
    """
    from ....triton_kernels.device_limits import device_limits  # it imports triton

    recording, gives_logits = record_step(loaded, spec, getattr(attention, "norms_heads", False))
    fused = FusedStep(recording, loaded.device, device_limits(), gives_logits=gives_logits)
    tokens_per_block = min(tokens_per_block, spec.max_position_embeddings)
    for count in compared_tokens(fused, num_rows):
        _compare(fused, loaded, attention, uploads, first_step(count, spec.vocab_size, tokens_per_block))
    return fused


def compared_tokens(fused: FusedStep, num_rows: int) -> list[int]:
    """Return the token counts of the steps on which `make_fused_step` compares the fused step with the model.

    These steps compile every kernel variant of steps of up to `num_rows` rows. Beyond FEW_ROWS rows, launch settings
    change with the number of row tiles, so one step is compared for each number of row tiles.
    """
    tiled = [count for count in fused.row_counts if count > FEW_ROWS and count - TILE_ROWS < num_rows]
    return [*COMPARED_TOKENS, *(tiled if num_rows > FEW_ROWS else ())]


def record_step(loaded: LoadedModel, spec: ModelSpec, norms_heads: bool = False) -> tuple[LaunchRecording, bool]:
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


def _compare(fused: FusedStep, loaded: LoadedModel, attention: Attention, uploads: Uploads, step: PackedStep) -> None:
    model, planned = loaded.model, attention.plan(step) or []
    token_ids, positions, *tensors = uploads.send([step.token_ids.astype(np.int64), step.positions.astype(np.int64),
                                                   *planned])
    if planned:
        attention.receive(tensors)
    hidden = model.embed(token_ids)
    expected = model.forward(hidden.clone(), positions, attention)
    if fused.gives_logits:
        expected = model.logits(expected)
    found = fused.run(hidden, positions, attention)
    for found_rows, expected_rows in zip(found.split(COMPARED_AT_ONCE), expected.split(COMPARED_AT_ONCE)):
        difference = describe_difference(found_rows, expected_rows, TOLERANCES[loaded.dtype])
        if difference:
            raise WrongStepError(f"the fused results of a first step of {counted(step.num_tokens, 'token')} differ "
                                 f"from the model's own results {difference}")
