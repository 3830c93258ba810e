"""Runs a model as compiled code on a CPU: one call for the recorded forward of a step, another call for the head.

`record_compiled` records both, and `check_compiled` compares the forward with the model's layers. If several processes
share the model, the forward is cut at their sums: there is a call for the operations between two of them.
"""

import time
from collections.abc import Sequence

import numpy as np
import torch

from ....contained_log import log
from ....errors import counted
from ....layers.context import ONE_PROCESS, Split
from ....layers.recording import NotRecordableError, RecordedAttention, Recording, record, record_head
from ....models.loading import LoadedModel
from ....models.spec import ModelSpec
from ....triton_kernels.cpu.large_pages import allocate
from ....triton_kernels.cpu.native.library import (
    ADAPTER_TILE,
    CACHE_TYPES,
    PROJECTIONS_AT_ONCE,
    ROWS_PER_TILE,
    TYPES,
    Adapters,
    Cache,
    Step,
    address,
    load_library,
)
from ....triton_kernels.cpu.native.matrix import PanelMatrix
from ...adapters.port import LoraPort, Segment
from ...packing import ModelCall
from ...parts import DeviceParts
from ..comparison import difference_from_layers, first_step
from ..form import NoForm
from .thread_governor import ThreadGovernor

COMPARED_TOKENS = 5
LARGEST_HEAD = 256                 # of compiled code
RANKS_ALIGNED = 8                  # results of A are written in groups of ranks
NO_SUMS = (None,)                  # the forward of one process is a single piece


class CompiledForward:
    """Runs the recorded operations of a model over a KV cache pool, for calls without padding. See Forward.

    This class allocates the registers that the operations read and write.

    recording     recording of a model with packed matrices, see layers/recording.py
    kv_pool       [num_blocks, layers, 2, kv_heads, tokens_per_block, head_size], in the data type of the recording or
                  in FP8
    num_heads     number of query heads
    governor      chooses the number of threads of each call
    port          the adapters that the recording adds; None: it adds none
    is_uniform    the bits of a row depend on its sequence alone, if this holds for the matrices; see PanelMatrix
    split         the processes that share the model. A call that raises between two of its sums leaves the others to
                  the caller
    Raises        CannotCompileError if the library cannot be built. The caller packs the matrices before it makes a
                  CompiledForward, and packing raises the same error
    """

    dispatch = "compiled"

    def __init__(self, recording: Recording, kv_pool: torch.Tensor, num_heads: int, governor: ThreadGovernor,
                 port: LoraPort | None = None, is_uniform: bool = False, split: Split = ONE_PROCESS) -> None:
        self._governor, self._port, self.adapts = governor, port, port is not None
        _, num_layers, _, kv_heads, block_tokens, head_size = kv_pool.shape
        self._library, self._recording, self._kv_pool = load_library(), recording, kv_pool
        self._type = TYPES[recording.dtype]
        self._operations = np.array(recording.operations, np.int64)
        ends = [number for number, _ in recording.cuts] + [len(self._operations)]
        self._pieces = [(self._operations[start:].ctypes.data, end - start) for start, end in zip([0, *ends], ends)]
        self._split, self._buffers = split, {}
        self._offsets, self._row_entries = arrange(recording)
        self._cache = Cache(kv_pool.data_ptr(), num_layers, kv_heads, block_tokens, head_size, num_heads,
                            CACHE_TYPES[kv_pool.dtype], is_uniform)
        self._registers = np.zeros(len(recording.strides), np.uintp)
        self._step = Step(registers=self._registers.ctypes.data,
                          cache=address(self._cache), type=self._type)
        self._capacity = 0

    def plan(self, call: ModelCall) -> tuple[()]:
        return ()

    def run(self, call: ModelCall, hidden: torch.Tensor, positions: torch.Tensor, tensors: Sequence[torch.Tensor]
            ) -> torch.Tensor:
        """See Forward. The result is after the last norm. Raises MemoryError."""
        rows, recording, step = len(hidden), self._recording, call.step
        if rows > self._capacity:
            self._make_room(rows)
        hidden = hidden.to(recording.dtype).contiguous()
        result = hidden
        if recording.result:                           # on a stage without the last norm, it can be the input
            result = torch.empty((rows, recording.strides[recording.result]), dtype=recording.dtype, device="cpu")
        self._registers[0], self._registers[recording.result] = hidden.data_ptr(), result.data_ptr()
        # Keep these arrays alive until the call returns: the compiled code has only their addresses.
        arrays = [np.ascontiguousarray(array, dtype) for array, dtype in (
            (step.positions, np.int32), (step.pool_slots, np.int64), (step.query_starts, np.int32),
            (step.block_tables, np.int32))]
        call = self._step
        call.positions, call.pool_slots, call.query_starts, call.block_tables = (array.ctypes.data for array in arrays)
        call.rows, call.num_sequences, call.table_stride = rows, len(step.slots), step.block_tables.shape[1]
        adapters = None
        if self._port is not None:
            adapters = self._adapters(self._port.segments_of(step.slots, step.query_starts), rows)
        call.adapters = None if adapters is None else address(adapters[0])
        threads = self._governor.threads_for(rows)
        start_ns, seconds = self._library.processor_nanoseconds(), 0.0
        sums = self._rows_of_sums(rows) if self._buffers else NO_SUMS
        for (operations, count), terms in zip(self._pieces, sums):
            start_s = time.perf_counter()
            if self._library.run_step(address(call), operations, count, threads):
                raise MemoryError(f"no memory for the work list of a step of {counted(rows, 'token')}")
            seconds += time.perf_counter() - start_s
            if terms is not None and (total := self._split.sum(terms)) is not terms:
                terms.copy_(total)
        self._governor.report(rows, seconds, (self._library.processor_nanoseconds() - start_ns) * 1e-9)
        return result[:, : hidden.shape[1]]

    def _rows_of_sums(self, rows: int) -> list[torch.Tensor | None]:
        """Return the rows that are summed after each piece of the operations; None after the last piece."""
        used = {offset: buffer[:rows] for offset, buffer in self._buffers.items()}
        return [*(used[self._offsets[cut.register]] for _, cut in self._recording.cuts), None]

    def _adapters(self, segments: Sequence[Segment], rows: int) -> tuple[Adapters, list[object]] | None:
        """Return the structure for the adapters of a step, and what it points to; None: no row has one."""
        if not segments:
            return None
        pages = self._port.pool.pages
        tiles = np.array([(first, min(first + ROWS_PER_TILE, end), *adapter.addresses)
                          for start, end, adapter in segments for first in range(start, end, ROWS_PER_TILE)],
                         ADAPTER_TILE)
        most_ranks = -(-max(len(segment.adapter.pages) for segment in segments) // RANKS_ALIGNED) * RANKS_ALIGNED
        shrunk = np.empty((rows, PROJECTIONS_AT_ONCE, most_ranks), np.float32)
        return Adapters(pages.data_ptr(), pages.shape[1], tiles.ctypes.data, len(tiles), shrunk.ctypes.data, most_ranks
                        ), [tiles, shrunk, segments]

    @property
    def threads(self) -> int:
        """Number of threads that computed the newest step."""
        return self._governor.newest

    @property
    def most_threads(self) -> int:
        """Largest number of threads of a step."""
        return self._governor.most

    def _make_room(self, rows: int) -> None:
        """Allocate the registers for at least `rows` rows. Fill them with zeros.

        If the rows of a register end in padding, the padding stays zero.
        """
        capacity, itemsize = max(rows, 2 * self._capacity), self._recording.dtype.itemsize
        memory, buffers = allocate(capacity * self._row_entries * itemsize), {}
        if self._recording.cuts:
            entries = torch.from_numpy(memory).view(self._recording.dtype)
        for _, cut in self._recording.cuts:
            stride, offset = self._recording.strides[cut.register], self._offsets[cut.register]
            own = entries[offset * capacity : (offset + stride) * capacity]
            buffers[offset] = own.view(-1, stride)[:, : cut.width]       # shared by registers in the same place
        start, self._memory, self._buffers = memory.ctypes.data, memory, buffers
        self._registers[:] = [start + offset * capacity * itemsize for offset in self._offsets]
        self._capacity = capacity              # set last: if the allocation fails, the old registers stay valid


class CompiledHead:
    """Multiplies with the matrix of a model's head, on the threads that `governor` chose last. See Head."""

    def __init__(self, matrix: PanelMatrix, governor: ThreadGovernor) -> None:
        self._matrix, self._governor = matrix, governor

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._matrix.multiply(hidden, torch.float32, self._governor.newest)

    def largest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._matrix.largest(hidden, self._governor.newest)


def arrange(recording: Recording) -> tuple[list[int], int]:
    """Return the offset of each register, and the size of all registers, in entries per row of the step.

    After the last use of a register, a later register of the same size can get its memory. A register whose rows end
    in padding keeps its memory, because the padding must stay zero.
    """
    last_use = {register: index for index, used in enumerate(recording.uses) for register in used}
    offsets, free, total = [0] * len(recording.strides), {}, 0
    placed, held = set(), {0, recording.result}
    sizes = [stride * recording.several.get(register, 1) for register, stride in enumerate(recording.strides)]
    for index, used in enumerate(recording.uses):
        for register in used:
            if register in placed or register in held:
                continue
            placed.add(register)
            if free.get(sizes[register]):
                offsets[register] = free[sizes[register]].pop()
            else:
                offsets[register], total = total, total + sizes[register]
        for register in set(used) - held:
            if last_use[register] == index and register in recording.whole:
                free.setdefault(sizes[register], []).append(offsets[register])
    return offsets, total


def obstacle_of_model(spec: ModelSpec, dtype: torch.dtype) -> str:
    """Return why no model of this spec and data type runs as compiled code; "" if it may."""
    if dtype not in TYPES:
        return f"it computes in {dtype}, not in {' or '.join(map(str, TYPES))}"
    if spec.head_size > LARGEST_HEAD:
        return f"its head_size is {spec.head_size}, above {LARGEST_HEAD}"
    return ""


def make_compiled(parts: DeviceParts, loaded: LoadedModel, spec: ModelSpec, sink: int
                  ) -> tuple[CompiledForward, CompiledHead | None]:
    """Return the result of `record_compiled`, after `check_compiled`. Raises the exceptions of both."""
    forward, head = record_compiled(parts, loaded, spec, sink)
    check_compiled(parts, loaded, forward)
    return forward, head


def record_compiled(parts: DeviceParts, loaded: LoadedModel, spec: ModelSpec, sink: int, split: Split = ONE_PROCESS,
                    is_last: bool = True) -> tuple[CompiledForward, CompiledHead | None]:
    """Return the compiled form of a model's forward, and of its head; None: the head does more than multiply.

    spec      the model's spec with the effective windows
    sink      number of sink tokens of the attention
    split     the processes that share the model
    is_last   whether the model is whole, or its last stage
    Raises    NotRecordableError
    """
    if obstacle := obstacle_of_model(spec, loaded.dtype):
        raise NotRecordableError(obstacle)
    recorded = RecordedAttention((spec.num_heads, spec.num_kv_heads, spec.head_size), spec.attention, sink)
    recording = record(loaded.model.forward, spec.hidden_size, loaded.dtype, recorded, may_be_input=not is_last)
    matrix = record_head(loaded.model.logits, spec.hidden_size, loaded.dtype)
    governor = ThreadGovernor(parts.num_threads or torch.get_num_threads())
    forward = CompiledForward(recording, parts.pool, spec.num_heads, governor, parts.adapters, loaded.deterministic,
                              split)
    return forward, None if matrix is None else CompiledHead(matrix, governor)


def check_compiled(parts: DeviceParts, loaded: LoadedModel, forward: CompiledForward) -> None:
    """Compare the results of the compiled forward on one step with those of the layers. Raises NoForm if they differ.

    If several processes run the model, each calls this function. Mutates block 0 of the KV cache pool.
    """
    spec = loaded.spec
    num_tokens = min(COMPARED_TOKENS, parts.tokens_per_block, spec.max_position_embeddings)
    step = first_step(num_tokens, spec.vocab_size, num_tokens)

    def difference() -> str:
        return difference_from_layers(
            loaded, parts.attention, parts.uploads.send, step,
            lambda hidden, positions, _: forward.run(ModelCall(step), hidden.to(loaded.dtype), positions, ()),
            gives_logits=False)

    found = difference()
    if parts.adapters is not None:                     # also after a difference, which other ranks may not have
        with parts.adapters.trying():
            parts.adapters.plan(step)
            with parts.adapters.active():
                adapted = difference()
        found = found or adapted and f"with a made-up adapter, {adapted}"
    if found:
        raise NoForm(found, is_wrong=True)
    log.info("steps run as compiled code on at most %s; torch runs the rest of a step",
             counted(forward.most_threads, "thread"))
