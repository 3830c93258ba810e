"""Records a model's forward, and runs it in generation steps with fewer launches than its layers make.

`fusion.fuse` joins operations. Joined operations run as one launch of the kernel `fused_linear`, if
`fused_linear_settings.is_fused` expects that to be faster. All other operations are launched as the layers launch them.
Layers and models need no code for fusion.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from ....attention.interface import Attention
from ....layers.recording import LookedUp, RecordedAttention, Rows, record
from ....models.loading import LoadedModel
from ....models.registry import Model
from ....models.spec import ModelSpec
from ....triton_kernels import dispatch
from ....triton_kernels.fused_linear_settings import FEW_ROWS, ROW_COUNTS, TILE_ROWS, is_fused
from ...parts import DeviceParts
from ..comparison import difference_from_layers, first_step
from ..form import NoForm
from .fusion import FusedProduct, fuse
from .recording import Activation, Attend, LaunchRecording, Norm, Operation, Product, Sum, is_whole, read_by, written_by

Registers = list[torch.Tensor | None]
Launch = Callable[[Registers, torch.Tensor, Attention], None]          # (registers, positions, attention)
COMPARED_TOKENS = (1, 5)           # products fused for more rows, up to FEW_ROWS, are fused for one row too


class FusedBody:
    """Runs the recorded operations of a model in generation steps of up to `most_rows` rows.

    limits         the DeviceLimits of the device
    gives_logits   whether the recording includes the head, so that `run` returns logits; otherwise hidden states
    row_counts     the row counts, out of ROW_COUNTS, with which at least one product is fused, in ascending order. The
                   smallest of ROW_COUNTS is always included
    most_rows      the last of `row_counts`; larger steps gain nothing from fusion
    """

    def __init__(self, recording: LaunchRecording, device: torch.device, limits: Any, *, gives_logits: bool) -> None:
        self._recording, self._device, self._limits, self.gives_logits = recording, device, limits, gives_logits
        self._launches: dict[int, list[tuple[Launch, list[int]]]] = {}
        self.row_counts = [count for count in ROW_COUNTS
                           if count == FEW_ROWS or any(isinstance(step, FusedProduct) for step in self._steps(count))]
        self.most_rows = self.row_counts[-1]

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, attention: Attention) -> torch.Tensor:
        """Run a step, and return its logits [r, vocab], or its hidden states if `self.gives_logits` is False.

        hidden      [r, hidden size], r <= self.most_rows; may be overwritten
        positions   [r] int64
        attention   the Attention of all layers, which has been planned or bound for the step
        """
        launches = self._launches.get(len(hidden))
        if launches is None:
            launches = self._launches[len(hidden)] = self._prepare(len(hidden))
        registers: Registers = [None] * len(self._recording.widths)
        registers[0] = hidden
        for launch, read_last in launches:
            launch(registers, positions, attention)
            for register in read_last:
                registers[register] = None           # frees its memory for later launches
        return registers[self._recording.result]

    def _prepare(self, num_rows: int) -> list[tuple[Launch, list[int]]]:
        """Return (launch, registers that no later launch uses) for each launch of a step of num_rows rows."""
        steps = self._steps(num_rows)
        last_use = {register: index for index, step in enumerate(steps) for register in _touched_by(step)}
        return [(_launch(step, self._recording.widths, self._device),
                 [register for register in set(_touched_by(step))
                  if last_use[register] == index and register != self._recording.result])
                for index, step in enumerate(steps)]

    def _steps(self, num_rows: int) -> list[Operation | FusedProduct]:
        return fuse(self._recording, lambda *sizes: is_fused(
            num_rows, *sizes, self._recording.dtype, self._limits))


def _touched_by(step: Operation | FusedProduct) -> list[int]:
    if isinstance(step, FusedProduct):
        return [step.x.register, step.result.register]
    return read_by(step) + written_by(step)


def _launch(step: Operation | FusedProduct, widths: list[int], device: torch.device) -> Launch:
    """Return a function that launches the operation `step`.

    Work that does not depend on the inputs is done here, and not again by the returned function.
    """
    result = step.result.register
    match step:
        case FusedProduct():
            return _fused_launch(step, device)
        case Norm():
            name, bias = ("rms_norm", {"weight_offset": step.offset}) if step.bias is None else ("layer_norm", {})
            vectors = (step.weight,) if step.bias is None else (step.weight, step.bias)
            norm, read = partial(dispatch.kernel(name, device), **bias), _reader(step.x, widths)

            def launch(registers, positions, attention):
                registers[result] = norm(read(registers), *vectors, step.epsilon).flatten(1)
        case Product():
            weight, bias, read, read_result = step.matrix.weight, step.matrix.bias, _reader(step.x, widths), None
            if step.adds:
                read_result = _reader(step.result, widths)

            def launch(registers, positions, attention):
                if read_result is None:
                    registers[result] = functional.linear(read(registers), weight, bias)
                elif bias is None:
                    read_result(registers).addmm_(read(registers), weight.t())
                else:
                    read_result(registers).add_(bias).addmm_(read(registers), weight.t())
        case Activation():
            read = _reader(step.x, widths)
            activate = dispatch.kernel("gated_activation" if step.gated else "activation", device)

            def launch(registers, positions, attention):
                registers[result] = activate(read(registers), step.kind)
        case Sum():
            read = _reader(step.x, widths)
            if isinstance(step.other, LookedUp):
                table = step.other.table

                def launch(registers, positions, attention):
                    registers[result] = (read(registers) + functional.embedding(positions, table)).flatten(1)
            else:
                read_other = _reader(step.other, widths)

                def launch(registers, positions, attention):
                    registers[result] = (read(registers) + read_other(registers)).flatten(1)
        case Attend():
            readers = [_reader(rows, widths) for rows in (step.query, step.key, step.value)]

            def launch(registers, positions, attention):
                heads = (read(registers) for read in readers)
                registers[result] = attention.run(step.layer, *heads, step.rotary, **step.more)
    return launch


def _fused_launch(step: FusedProduct, device: torch.device) -> Launch:
    x, result, matrix, norm, activation = (step.x.register, step.result.register, step.product.matrix, step.norm,
                                           step.activation)
    options = {"bias": matrix.bias}
    if norm is not None:
        options |= {"norm_weight": norm.weight, "norm_bias": norm.bias, "epsilon": norm.epsilon,
                    "weight_offset": norm.offset}
    if activation is not None:
        options |= {"activation": activation.kind, "gated": activation.gated}
    linear = partial(dispatch.kernel("fused_linear", device), **options)

    def launch(registers, positions, attention):
        registers[result] = linear(registers[x], matrix.weight)

    def launch_adding(registers, positions, attention):
        linear(registers[x], matrix.weight, residual=registers[result])
    return launch_adding if step.product.adds else launch


def _reader(rows: Rows, widths: list[int]) -> Callable[[Registers], torch.Tensor]:
    """Return a function that takes all registers and returns the columns in `rows`.

    The result has the shape [r, width], or [r, heads, size] if the columns are divided into heads.
    """
    register, begin, end, heads = rows.register, rows.column, rows.column + rows.width, rows.heads
    if is_whole(rows, widths):
        return lambda registers: registers[register]
    if heads is None:
        return lambda registers: registers[register][:, begin:end]
    size = rows.size
    return lambda registers: registers[register][:, begin:end].unflatten(1, (heads, size))


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
