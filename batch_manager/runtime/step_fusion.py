"""Making the step of few rows that runs as it was recorded, and the proof that it gives what the model gives."""

import numpy as np
import torch

from ..attention.interface import Attention, PackedStep
from ..layers.recording import NotRecordableError, RecordedAttention, Rows, record
from ..models.loading import LoadedModel
from ..models.model_spec import ModelSpec
from ..models.registry import Model
from .device import Uploads
from .first_step import excess_of, first_step
from .fused_step import FusedStep
from .launch_recording import LaunchRecording, is_whole

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
COMPARED_TOKENS = (1, 5)           # in each of them. What is fused for more rows is fused for one: all is compiled then


class WrongStepError(NotRecordableError):
    """What was recorded does not give what the model gives."""


def make_fused_step(loaded: LoadedModel, spec: ModelSpec, attention: Attention, uploads: Uploads,
                    tokens_per_block: int) -> FusedStep:
    """The model's forward, and its head where it is a product, compared with the model itself on first steps, for which
    it uses block 0 of the pool.

    spec     with the windows in force
    Raises   NotRecordableError, whose text says why the model's layers make all their launches themselves
    """
    from ..triton_kernels.device_limits import device_limits  # it imports triton

    recording, gives_logits = record_step(loaded, spec)
    fused = FusedStep(recording, loaded.device, device_limits(), gives_logits=gives_logits)
    for count in COMPARED_TOKENS:
        if count <= tokens_per_block:
            _compare(fused, loaded, attention, uploads, first_step(count, spec.vocab_size))
    return fused


def record_step(loaded: LoadedModel, spec: ModelSpec) -> tuple[LaunchRecording, bool]:
    """(what the model does to its rows, whether its head is part of that). Raises NotRecordableError."""
    recorded = RecordedAttention((spec.num_heads, spec.num_kv_heads, spec.head_size), spec.attention, 0)
    recording = record(loaded.model.forward, spec.hidden_size, loaded.dtype, recorded, make=LaunchRecording)
    return recording, _record_head(loaded.model, recording)


def _record_head(model: Model, recording: LaunchRecording) -> bool:
    """Add the head to the recording. False: it does what no operation does, and nothing was added."""
    num_operations, num_registers = len(recording.operations), len(recording.widths)
    try:
        logits = model.logits(Rows(recording, recording.result, 0, recording.widths[recording.result]))
    except Exception:                       # no operation does what it does, or it takes tensors only
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
    excess = excess_of(fused.run(hidden, positions, attention), expected, TOLERANCES[loaded.dtype])
    if excess:
        raise WrongStepError(f"a first step of {step.num_tokens} tokens differs from the model's {excess}")
