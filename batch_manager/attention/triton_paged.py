"""Paged attention with the Triton kernels.

For contexts, one kernel norms and rotates queries and keys and appends keys and values to the KV cache, and another
kernel attends. For generation rows, a single kernel does all of this.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain

import numpy as np
import torch

from ..triton_kernels.context_work_list import (
    FIXED_PART_KEYS,
    UNIFORM_ROWS,
    WORK_COLUMNS,
    ContextHeads,
    ContextTileWork,
    MostContextTileWork,
    context_tile_rows,
    context_work_list,
    most_context_work,
    most_partials,
)
from ..triton_kernels.decode_work_list import decode_work_list, most_parts
from ..triton_kernels.device_limits import device_limits
from ..triton_kernels.paged_attention_context import context_heads, paged_attention_context
from ..triton_kernels.paged_attention_decode import decode_settings, paged_attention_decode
from ..triton_kernels.rope_kv_append import rope_kv_append
from .interface import (
    ContextInputs,
    GenerationInputs,
    HeadLayout,
    HeadNormWeights,
    PackedStep,
    RotaryTable,
    refuse_wrong_sink_logits,
)

# Whether the decode kernel itself combines the parts of split sequences, instead of a second launch. It depends on the
# order of memory operations, which no test without a GPU shows. On NVIDIA GPUs, set it to True when
# `python -m tests.attention.repeated_merges` has found the same bits in 10,000 launches.
MERGES_IN_DECODE = False
MOST_MERGED_SIZE = 128             # entries of a head; with more, too few registers are left for a second program


class TritonPagedAttention:
    """Paged attention in Triton over `kv_pool` [num_blocks, layers, 2, kv_heads, tokens_per_block, head_size].

    sink            number of sink tokens; see windows.py
    dtype           of queries, keys and values; None: that of the pool. A pool of float8_e4m3fn has rounded ones
    deterministic   make the bits of a row independent of the step that computes it: generation rows run in the context
                    kernel, as contexts of one token, with `plan` and with `bind`, and keys are cut into fixed parts

    All inputs of a step are uploaded as one array of integers, to save host time.
    """

    dispatch = "triton"
    norms_heads = can_bind = True

    def __init__(self, spec: HeadLayout, kv_pool: torch.Tensor, sink: int = 0, deterministic: bool = False,
                 dtype: torch.dtype | None = None) -> None:
        assert kv_pool.is_contiguous()
        assert (kv_pool.shape[1], kv_pool.shape[3], kv_pool.shape[5]) == (
            spec.num_layers, spec.num_kv_heads, spec.head_size)
        self.attention, self.sink, self._num_heads = spec.attention, sink, spec.num_heads
        self.windows = tuple(dict.fromkeys(layer.window for layer in spec.attention))
        self.layer_pools = kv_pool.unbind(1)                       # [N, 2, kv heads, B, D] each
        tensors = {slopes: torch.tensor(slopes, dtype=torch.float32, device=kv_pool.device)
                   for slopes in dict.fromkeys(layer.alibi_slopes for layer in spec.attention) if slopes is not None}
        self._counters: list[torch.Tensor] = []
        self.slopes = [tensors.get(layer.alibi_slopes) for layer in spec.attention]
        self.deterministic = deterministic
        self.part_keys = FIXED_PART_KEYS if deterministic else None
        self._element_bytes = (dtype or kv_pool.dtype).itemsize    # of what matrix instructions multiply
        self.tile_rows = UNIFORM_ROWS if deterministic else context_tile_rows(spec.head_size, self._element_bytes)

    def plan(self, step: PackedStep) -> Sequence[np.ndarray]:
        contexts = len(step.slots) if self.deterministic else step.num_contexts
        starts, kv_lengths = step.query_starts[: contexts + 1], step.kv_lengths
        decode_work = self.plan_generation(kv_lengths[contexts:])
        context_work = self.plan_contexts(np.diff(starts), kv_lengths[:contexts]) if contexts else {}
        self._are_split = {window: bool(part_starts[-1]) for window, (_, part_starts) in decode_work.items()}
        self._are_contexts_split = {window: bool(work.part_starts[-1]) for window, work in context_work.items()}
        # The int64 array comes first, because an upload starts at a multiple of 8 bytes.
        split = int(starts[-1])
        arrays = [step.pool_slots[:split].astype(np.int64).view(np.int32), step.positions[:split], kv_lengths, starts,
                  step.block_tables, *chain(*context_work.values(), *decode_work.values())]
        self._sizes = [array.size for array in arrays]
        self._num_sequences, self._num_contexts = len(kv_lengths), contexts
        self._context_rows, self._generation_rows = slice(0, split), slice(split, step.num_tokens)
        return [np.concatenate([array.ravel() for array in arrays], dtype=np.int32)]

    def receive(self, tensors: Sequence[torch.Tensor]) -> None:
        pool_slots, positions, kv_lengths, query_starts, table, *more = tensors[0].split(self._sizes)
        table, contexts = table.view(self._num_sequences, -1), self._num_contexts
        self._contexts, self._generation = [], None
        if contexts:
            work = {window: (work_list.view(-1, WORK_COLUMNS), *(merging if is_split else (None, None)))
                    for (window, is_split), work_list, *merging in zip(
                        self._are_contexts_split.items(), more[::3], more[1::3], more[2::3])}
            self._contexts = [(self._context_rows, ContextInputs(
                positions, pool_slots.view(torch.int64), query_starts, kv_lengths[:contexts], None, table[:contexts],
                work))]
            more = more[3 * len(work):]
        if self._are_split:
            self._generation = GenerationInputs(kv_lengths[contexts:], None, table[contexts:], {
                window: (work_list.view(-1, 4), part_starts if is_split else None)
                for (window, is_split), work_list, part_starts in zip(self._are_split.items(), more[::2], more[1::2])})

    def plan_generation(self, kv_lengths: np.ndarray) -> dict[int | None, tuple[np.ndarray, np.ndarray]]:
        """Return window -> (work list, index of each sequence's first partial result) for s generation rows.

        `decode_work_list` describes both arrays. With `deterministic`, the work list is that of contexts of one token,
        without the column of their only tile.

        kv_lengths   [s] tokens of each sequence in the KV cache, including the new token
        """
        if not len(kv_lengths):
            return {}
        if self.deterministic:
            return {window: _of_generation(work, len(kv_lengths))
                    for window, work in self.plan_contexts(np.ones_like(kv_lengths), kv_lengths).items()}
        kv_heads, tokens_per_block = self.layer_pools[0].shape[2:4]
        resident = self._resident_programs()
        return {window: decode_work_list(kv_lengths, tokens_per_block, kv_heads, resident, window, self.sink)
                for window in self.windows}

    def most_parts(self, num_rows: int, max_blocks: int) -> int:
        """Return the maximum number of rows of a work list of `plan_generation`, for `num_rows` sequences of at most
        `max_blocks` blocks."""
        if self.deterministic:
            return self.most_context_work(num_rows, num_rows, max_blocks, True).rows
        return most_parts(num_rows, max_blocks, self.layer_pools[0].shape[2], self._resident_programs())

    def plan_contexts(self, query_lengths: np.ndarray, kv_lengths: np.ndarray) -> dict[int | None, ContextTileWork]:
        """Return window -> work of the contexts with these lengths; see `context_work_list`."""
        return {window: context_work_list(query_lengths, kv_lengths, self.tile_rows, heads=self._context_heads,
                                          window=window, sink=self.sink) for window in self.windows}

    def most_context_work(self, num_tokens: int, num_contexts: int, max_blocks: int, may_split: bool
                          ) -> MostContextTileWork:
        """Return the maximum sizes of a result of `plan_contexts`; see BindableAttention.most_context_work."""
        max_keys = max_blocks * self.layer_pools[0].shape[3]
        return most_context_work(num_tokens, num_contexts, self.tile_rows, self._context_heads if may_split else None,
                                 max_keys)

    def bind(self, generation: GenerationInputs, contexts: ContextInputs | None) -> None:
        """Make `run` read the tensors of `generation` and `contexts`.

        A step calls this method instead of `plan` and `receive`.
        """
        rows = len(generation.kv_lengths)
        self._generation, self._generation_rows = generation, slice(0, rows)
        self._contexts = [] if contexts is None else [(slice(rows, None), contexts)]
        if self.deterministic:
            # Block tables of their own, so that these launches have the arguments of steps with `plan`.
            self._contexts = [(part, replace(given, table_rows=None, block_tables=_own_tables(given)))
                              for part, given in self._contexts]
            if rows:
                self._contexts.insert(0, (self._generation_rows, self._as_contexts(generation)))
            self._generation = None

    def _as_contexts(self, generation: GenerationInputs) -> ContextInputs:
        """Return generation rows as contexts of one token. A padding row stores nothing and sees no key."""
        lengths, tables = generation.kv_lengths, _own_tables(generation)
        tokens_per_block, rows = self.layer_pools[0].shape[3], torch.arange(len(lengths) + 1, dtype=torch.int32,
                                                                            device=lengths.device)
        positions = (lengths - 1).clamp_(min=0)
        blocks = tables.gather(1, (positions // tokens_per_block).long()[:, None])[:, 0].long()
        slots = torch.where(lengths > 0, blocks * tokens_per_block + positions % tokens_per_block, -1)
        work = {window: (torch.cat([given[:, :1], torch.zeros_like(given[:, :1]), given[:, 1:]], 1), part_starts,
                         None if part_starts is None else rows[:-1])
                for window, (given, part_starts) in generation.work.items()}
        return ContextInputs(positions, slots, rows, lengths, None, tables, work)

    def _resident_programs(self) -> int:
        pool = self.layer_pools[0]
        tokens_per_block, head_size = pool.shape[3:]
        # `device_limits` reads the current device, which is the engine's during a step.
        return decode_settings(head_size, tokens_per_block, self._element_bytes, device_limits()).resident_programs

    @cached_property
    def _context_heads(self) -> ContextHeads:
        """Return the numbers from which `context_work_list` computes the number of parts of each tile."""
        pool = self.layer_pools[0]
        kv_heads, tokens_per_block, head_size = pool.shape[2:]
        return context_heads(self._num_heads, kv_heads, head_size, self._element_bytes, tokens_per_block,
                             device_limits(), self.part_keys)

    def run(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            rotary: RotaryTable | None, sink_logits: torch.Tensor | None = None,
            norms: HeadNormWeights | None = None) -> torch.Tensor:
        pool, attention = self.layer_pools[layer], self.attention[layer]
        if attention.has_sink_logits != (sink_logits is not None):
            refuse_wrong_sink_logits(layer, attention, sink_logits)
        more = {"softcap": attention.softcap, "alibi_slopes": self.slopes[layer],
                "alibi_bfloat16_factor": attention.alibi_bfloat16_factor, "sink_logits": sink_logits}
        scales = {"key_scale": attention.key_scale, "value_scale": attention.value_scale}
        before = {} if rotary is None else {"cos_table": rotary.cos, "sin_table": rotary.sin}
        if norms is not None:
            before |= {"query_norm": norms.query_weight, "key_norm": norms.key_weight, "epsilon": norms.epsilon,
                       "weight_offset": norms.weight_offset}
        result = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        for rows, given in self._contexts:
            queries, (work_list, part_starts, merged_rows) = query[rows], given.work[attention.window]
            num_partials = 0
            if part_starts is not None:
                max_keys = given.block_tables.shape[1] * pool.shape[3]
                num_partials = most_partials(self.tile_rows, self._context_heads, max_keys)
            rope_kv_append(queries, key[rows], value[rows], pool, given.pool_slots, given.positions,
                           **before, **scales)
            paged_attention_context(queries, pool, given.block_tables, given.query_starts, given.kv_lengths, work_list,
                                    attention.scale, attention.window, slots=given.table_rows, out=result[rows],
                                    sink=self.sink, part_keys=self.part_keys, part_starts=part_starts,
                                    merged_rows=merged_rows, num_partials=num_partials, **more, **scales)
        if self._generation is not None:
            rows, given = self._generation_rows, self._generation
            if MERGES_IN_DECODE and device_limits().rows_pass_shared and query.shape[2] <= MOST_MERGED_SIZE:    # NVIDIA
                more["counters"] = self._merge_counters(len(given.kv_lengths))
            paged_attention_decode(query[rows], key[rows], value[rows], pool, given.block_tables, given.kv_lengths,
                                   *given.work[attention.window], attention.scale, attention.window,
                                   slots=given.table_rows, out=result[rows], sink=self.sink, **before, **more,
                                   **scales)
        return result.flatten(1)

    def _merge_counters(self, num_rows: int) -> torch.Tensor:
        """Return zeros that all layers use in turn, at least one for each row and kv head.

        Captured graphs use earlier tensors, which are therefore kept.
        """
        needed = num_rows * self.layer_pools[0].shape[2]
        if not self._counters or self._counters[-1].numel() < needed:
            self._counters.append(torch.zeros(2 * needed, dtype=torch.int32, device=self.layer_pools[0].device))
        return self._counters[-1]


def _of_generation(work: ContextTileWork, num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the work of `num_rows` contexts of one token as that of generation rows; see `plan_generation`."""
    num_parts = np.zeros(num_rows + 1, np.int32)
    num_parts[work.merged_rows + 1] = np.diff(work.part_starts)
    return np.delete(work.work_list, 1, axis=1), num_parts.cumsum(dtype=np.int32)


def _own_tables(given: GenerationInputs | ContextInputs) -> torch.Tensor:
    """Return the block table of each sequence, in order."""
    return given.block_tables if given.table_rows is None else given.block_tables.index_select(0, given.table_rows)
