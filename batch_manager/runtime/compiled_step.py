"""A model on a CPU as compiled code: its forward, as it was recorded, in one call over the rows of each step; its head
in another."""

import time

import numpy as np
import torch

from ..attention.interface import PackedStep
from ..layers.recording import Recording
from ..triton_kernels.cpu.large_pages import allocate
from ..triton_kernels.cpu.native.library import TYPES, Cache, Step, address, load_library
from ..triton_kernels.cpu.native.matrix import PackedMatrix
from .thread_governor import ThreadGovernor


class CompiledStep:
    """The recorded operations, where their rows lie, and the cache they attend to.

    recording     see layers/recording.py; of a model whose matrices are packed
    kv_pool       [num_blocks, layers, 2, kv_heads, tokens_per_block, head_size]
    num_heads     query heads
    head          the matrix that is all of the model's head; None: the head is something else
    threads       to compute with at most, the calling one among them
    Raises        CannotCompileError, which packing the matrices has raised before
    """

    def __init__(self, recording: Recording, kv_pool: torch.Tensor, num_heads: int, head: PackedMatrix | None,
                 threads: int) -> None:
        self._head, self._governor = head, ThreadGovernor(threads)
        _, num_layers, _, kv_heads, block_tokens, head_size = kv_pool.shape
        self._library, self._recording, self._kv_pool = load_library(), recording, kv_pool
        self._type = TYPES[recording.dtype]
        self._operations = np.array(recording.operations, np.int64)
        self._offsets, self._row_entries = arrange(recording)
        self._cache = Cache(kv_pool.data_ptr(), num_layers, kv_heads, block_tokens, head_size, num_heads, self._type)
        self._registers = np.zeros(len(recording.strides), np.uintp)
        self._step = Step(registers=self._registers.ctypes.data,
                          cache=address(self._cache), type=self._type)
        self._capacity = 0

    def run(self, hidden: torch.Tensor, step: PackedStep) -> torch.Tensor:
        """hidden [T, hidden size], which is overwritten -> the hidden states after the model's last layer.

        Mutates   the pool's pages of the step's tokens
        Raises    MemoryError
        """
        rows, recording = len(hidden), self._recording
        if rows > self._capacity:
            self._make_room(rows)
        hidden = hidden.to(recording.dtype).contiguous()
        result = torch.empty((rows, recording.strides[recording.result]), dtype=recording.dtype, device="cpu")
        self._registers[0], self._registers[recording.result] = hidden.data_ptr(), result.data_ptr()
        # Held until the call is over: the compiled code has their addresses alone.
        arrays = [np.ascontiguousarray(array, dtype) for array, dtype in (
            (step.positions, np.int32), (step.pool_slots, np.int64), (step.query_starts, np.int32),
            (step.block_tables, np.int32))]
        call = self._step
        call.positions, call.pool_slots, call.query_starts, call.block_tables = (array.ctypes.data for array in arrays)
        call.rows, call.num_sequences, call.table_stride = rows, len(step.slots), step.block_tables.shape[1]
        threads = self._governor.threads_for(rows)
        start_s, start_ns = time.perf_counter(), self._library.processor_nanoseconds()
        if self._library.run_step(address(call), self._operations.ctypes.data, len(self._operations), threads):
            raise MemoryError(f"no memory for the list of pieces of a step of {rows:,} tokens")
        self._governor.report(rows, time.perf_counter() - start_s,
                              (self._library.processor_nanoseconds() - start_ns) * 1e-9)
        return result[:, : hidden.shape[1]]

    @property
    def threads(self) -> int:
        """Those of the newest step."""
        return self._governor.newest

    @property
    def has_head(self) -> bool:
        """Whether `logits` and `largest` may be called."""
        return self._head is not None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [r, hidden size] -> [r, vocab] float32."""
        return self._head.multiply(hidden, torch.float32, self.threads)

    def largest(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """hidden [r, hidden size] -> (the token of the largest of each row's logits [r] int64, the lowest of equals;
        that logit [r] float32, NaN where a logit is). The logits themselves are not kept."""
        return self._head.largest(hidden, self.threads)

    def _make_room(self, rows: int) -> None:
        """Registers for so many rows: zeros, and what lies after the last column of a row stays zero."""
        capacity, itemsize = max(rows, 2 * self._capacity), self._recording.dtype.itemsize
        self._memory = allocate(capacity * self._row_entries * itemsize)
        start = self._memory.ctypes.data
        self._registers[:] = [start + offset * capacity * itemsize for offset in self._offsets]
        self._capacity = capacity              # last: where there is no memory, the registers are the ones before


def arrange(recording: Recording) -> tuple[list[int], int]:
    """Where registers begin, in entries a row, and how many entries a row takes in all.

    A register's place goes to another of the same stride after its last use. One whose rows end before its stride does
    keeps its place: what lies after them is zeros, and has to stay so.
    """
    last_use = {register: index for index, used in enumerate(recording.uses) for register in used}
    offsets, free, total = [0] * len(recording.strides), {}, 0
    placed, held = set(), {0, recording.result}
    for index, used in enumerate(recording.uses):
        for register in used:
            if register in placed or register in held:
                continue
            placed.add(register)
            stride = recording.strides[register]
            if free.get(stride):
                offsets[register] = free[stride].pop()
            else:
                offsets[register], total = total, total + stride
        for register in set(used) - held:
            if last_use[register] == index and register in recording.whole:
                free.setdefault(recording.strides[register], []).append(offsets[register])
    return offsets, total
