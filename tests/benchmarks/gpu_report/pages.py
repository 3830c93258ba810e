"""Realistic inputs of the attention kernels: blocks in random order, several layers in one pool."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from batch_manager.triton_kernels.context_work_list import UNIFORM_ROWS, context_tile_rows, context_work_list
from batch_manager.triton_kernels.decode_work_list import decode_work_list
from batch_manager.triton_kernels.device_limits import device_limits
from batch_manager.triton_kernels.paged_attention_context import context_heads, paged_attention_context
from batch_manager.triton_kernels.paged_attention_decode import decode_settings, paged_attention_decode
from batch_manager.triton_kernels.reference.paged_attention_context import paged_attention_context as context_oracle
from batch_manager.triton_kernels.reference.paged_attention_decode import paged_attention_decode as decode_oracle
from batch_manager.triton_kernels.reference.rope_kv_append import rope_kv_append

from .bench import Bench

LAYERS = 4          # launches alternate between the layers, which together are far larger than the cache of a GPU


@dataclass(frozen=True, slots=True)
class Heads:
    """Numbers and size of the attention heads.

    kv      number of KV heads
    group   number of query heads for each KV head
    size    number of entries of a head
    """

    kv: int
    group: int
    size: int

    @property
    def query(self) -> int:
        return self.kv * self.group

    @property
    def scale(self) -> float:
        return self.size**-0.5


class PagedSequences:
    """Sequences with random keys and values, in randomly ordered blocks.

    lengths        [S] number of keys of each sequence
    new_tokens     number of query tokens of each sequence, which are its last tokens; 1: a generation step
    cached         dtype of keys and values in the pool; None: that of the queries

    query, key, value   random outputs of the QKV projection for the query tokens
    rotated             `query` after rotation; exists only for a generation step

    For a generation step, the constructor writes the new keys and values to every layer of the pool.
    """

    def __init__(self, bench: Bench, heads: Heads, lengths: np.ndarray, new_tokens: int = 1,
                 tokens_per_block: int = 64, cached: torch.dtype | None = None) -> None:
        self.heads, self.lengths, self.new_tokens = heads, np.asarray(lengths, np.int64), new_tokens
        pages = -(-self.lengths // tokens_per_block)
        num_blocks = int(pages.sum())
        self.pool = bench.normal(num_blocks, LAYERS, 2, heads.kv, tokens_per_block, heads.size)
        self.pool = self.pool.to(cached or self.pool.dtype)
        order = np.random.default_rng(num_blocks).permutation(num_blocks)
        table = np.zeros((len(pages), int(pages.max())), np.int32)
        starts = pages.cumsum() - pages
        for row, (start, count) in enumerate(zip(starts, pages, strict=True)):
            table[row, :count] = order[start : start + count]
        self.block_table = bench.tensor(table, torch.int32)
        self.kv_lengths = bench.tensor(self.lengths, torch.int32)
        rows = len(pages) * new_tokens
        self.query, self.key, self.value = bench.normal(rows, heads.query + 2 * heads.kv, heads.size).split(
            [heads.query, heads.kv, heads.kv], 1)
        if new_tokens == 1:
            angles = bench.normal(int(self.lengths.max()), heads.size // 2, dtype=torch.float32)
            self.tables = {"cos_table": angles.cos(), "sin_table": angles.sin()}
            self.rotated = self._append(table, tokens_per_block)
        self.out = bench.poisoned(rows, heads.query, heads.size)
        self.starts = np.arange(len(pages) + 1) * new_tokens
        self.cu_seqlens = bench.tensor(self.starts, torch.int32)

    def _append(self, table: np.ndarray, tokens_per_block: int) -> torch.Tensor:
        """Write the newest keys and values to each layer, and return the rotated queries."""
        newest = self.lengths - 1
        blocks = table[np.arange(len(newest)), newest // tokens_per_block].astype(np.int64)
        slots, positions = (torch.from_numpy(numbers).to(self.query.device)
                            for numbers in (blocks * tokens_per_block + newest % tokens_per_block, newest))
        rotated = torch.empty(self.query.shape, dtype=self.query.dtype, device=self.query.device)
        for number in range(LAYERS):
            rope_kv_append(self.query, self.key, self.value, self.layer(number), slots, positions, **self.tables,
                           query_out=rotated)
        return rotated

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values that a generation step reads in one layer."""
        return int(self.lengths.sum()) * 2 * self.heads.kv * self.heads.size * self.pool.element_size()

    @property
    def causal_operations(self) -> float:
        """Number of operations of one layer: 4 * head size for each query, query head and visible key."""
        first = self.lengths - self.new_tokens
        pairs = self.new_tokens * first + self.new_tokens * (self.new_tokens + 1) // 2
        return 4.0 * self.heads.query * self.heads.size * float(pairs.sum())

    def layer(self, number: int) -> torch.Tensor:
        """Return the view of one layer for a kernel: [blocks, 2, KV heads, tokens per block, head size]."""
        return self.pool[:, number % LAYERS]

    def decode(self, resident_programs: int | None = None, pages_per_part: int | None = None,
               ) -> Callable[[int], torch.Tensor]:
        """Return a function (number) -> output that runs decode attention on layer `number`, as an engine does.

        The function also appends the newest keys and values to the layer.

        resident_programs, pages_per_part   arguments of `decode_work_list`; None: the values that an engine uses
        """
        block, size = self.pool.shape[4:]
        if resident_programs is None:
            resident_programs = decode_settings(
                size, block, self.query.element_size(), device_limits()).resident_programs
        work_list, part_starts = decode_work_list(
            self.lengths, block, self.heads.kv, resident_programs, pages_per_part=pages_per_part)
        work = torch.from_numpy(work_list).to(self.query.device)
        starts = torch.from_numpy(part_starts).to(self.query.device) if part_starts[-1] else None
        return lambda number: paged_attention_decode(
            self.query, self.key, self.value, self.layer(number), self.block_table, self.kv_lengths, work, starts,
            self.heads.scale, out=self.out, **self.tables)

    def context(self, tile_rows: int | None = None, num_parts: int | None = None,
                part_keys: int | None = None) -> Callable[[int], torch.Tensor]:
        """Return a function (number) -> output that runs context attention on layer `number`, as an engine does.

        tile_rows   rows of a tile of queries; None: as many as in an engine
        num_parts   number of parts of the keys of each tile; None: chosen for each tile, as in an engine
        part_keys   keys of a fixed part, as in a deterministic engine; None: parts of any size
        """
        block, size = self.pool.shape[4:]
        rows = tile_rows or (UNIFORM_ROWS if part_keys else
                             context_tile_rows(self.heads.size, self.query.element_size()))
        heads = context_heads(self.heads.query, self.heads.kv, size, self.query.element_size(), block,
                              device_limits(), part_keys)
        work_list, part_starts, merged_rows = (torch.from_numpy(array).to(self.query.device) for array in (
            context_work_list(np.full(len(self.lengths), self.new_tokens), self.lengths, rows, heads=heads,
                              num_parts=num_parts)))
        parts = {}
        if len(merged_rows):
            parts = {"part_starts": part_starts, "merged_rows": merged_rows, "num_partials": int(part_starts[-1])}
        return lambda number: paged_attention_context(
            self.query, self.layer(number), self.block_table, self.cu_seqlens, self.kv_lengths, work_list,
            self.heads.scale, out=self.out, part_keys=part_keys, **parts)

    def decode_error(self, launch: Callable[[int], torch.Tensor]) -> float:
        """Call `launch` for layer 0, and return the relative error of its output for a few sequences.

        The oracle uses float64. Returns infinity if any output is not finite.
        """
        self.out.fill_(torch.nan)
        result = launch(0)
        some = np.unique(np.linspace(0, len(self.lengths) - 1, 4).astype(int))
        expected = torch.cat([decode_oracle(
            *(given[row : row + 1].double() for given in (self.query, self.key, self.value)), self.layer(0),
            self.block_table[row : row + 1], self.kv_lengths[row : row + 1], None, None, self.heads.scale,
            **self.tables) for row in some])
        # The other rows must be written too.
        return relative_error(result[some], expected) if result.isfinite().all() else float("inf")

    def context_error(self, launch: Callable[[int], torch.Tensor], most_rows: int = 64) -> float:
        """Call `launch` for layer 0, and return the larger of the relative errors of the first and the last sequence.

        At most the last `most_rows` query tokens of a sequence are compared. The oracle uses float64. Returns
        infinity if any output is not finite.
        """
        self.out.fill_(torch.nan)
        result = launch(0)
        rows = min(most_rows, self.new_tokens)
        errors = []
        for sequence in {0, len(self.lengths) - 1}:
            stop = (sequence + 1) * self.new_tokens
            ends = torch.tensor([0, rows], dtype=torch.int32, device=self.query.device)
            expected = context_oracle(
                self.query[stop - rows : stop].double(), self.layer(0), self.block_table[sequence : sequence + 1], ends,
                self.kv_lengths[sequence : sequence + 1], None, self.heads.scale)
            errors.append(relative_error(result[stop - rows : stop], expected))
        return max(errors) if result.isfinite().all() else float("inf")


def relative_error(out: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the difference over the norm of `expected`; infinite if `out` is not finite."""
    out, expected = out.double(), expected.double()
    if not out.isfinite().all():
        return float("inf")
    return float((out - expected).norm() / expected.norm().clamp(min=1e-30))
