"""Paged attention in plain torch, laid out for the memory system of a CPU.

A *page* is the part of a block that belongs to one layer, one head, and either keys or values: [tokens_per_block,
head_size], contiguous. The pages of a sequence are gathered in the order (head, block). One batched matrix product then
serves all heads of a group of sequences of similar length. The rows of a product are the query heads that share a kv
head, so no key or value is repeated per query head. Multiplying with strided views of the pool instead of gathering
took three times as long, even for consecutive blocks: the pages of one layer and head are not adjacent, and the
products become too small.
"""

from dataclasses import dataclass

import numpy as np
import torch

from ..triton_kernels.cpu.rope_kv_append import StepRows, packed, pool_rows
from .alibi import alibi_bias
from .fp8 import FP8, Fp8Numbers
from .interface import HeadLayout, PackedStep, RotaryTable, refuse_wrong_sink_logits
from .windows import blocks_seen

# Sequences of one batched product are padded to the longest. A group ends when its padding would exceed this size:
# reading that much costs about as much as the operations of one more group.
MAX_PADDED_BYTES = 1024 * 1024

# Query rows of a context that are computed at once: their scores fit the cache, and keys after them are skipped.
TILE_ROWS = 64


@dataclass(slots=True)
class _Tile:
    """Query rows of a context, and the keys that they see.

    rows     packed rows of the queries
    sinks    number of sink keys that all rows see and that are not in `keys`
    keys     the tile's range in the gathered keys of the context. It ends with the key of the last row. If a gap
             separates the sinks from the window of the first row, the range starts with the first key of that window.
             Without a gap, it starts with the key at position 0
    window_mask   [rows, n] for the first n of `keys`: -inf where the key is before the window of the row and is not a
             sink, else 0. None: no key is outside the window of a row
    first    (position of the first row, position of the first of `keys`)
    """

    rows: slice
    sinks: int
    keys: slice
    window_mask: torch.Tensor | None
    first: tuple[int, int]


@dataclass(slots=True)
class _Context:
    """The query rows of one context, in tiles, and the pages that they read.

    The object serves the layers that have the same window.

    rows    packed rows of the queries
    pages   [2 * kv_heads * m] int64   page numbers of m blocks, in the order (key or value, head, block); None: nothing
            is cached, so the sequence attends only to keys of this step
    """

    rows: slice
    pages: torch.Tensor | None
    tiles: list[_Tile]


@dataclass(slots=True)
class _Group:
    """Generation rows of n sequences of similar length, which are computed together.

    The group serves the layers that have the same window and ALiBi bias.

    rows    [n] int64: the packed row of each sequence; a slice if these rows are consecutive
    pages   [2 * n * kv_heads * m] int64   page numbers of m blocks per sequence, in the order (key or value, sequence,
            head, block)
    mask    [n * kv_heads, 1, m * tokens_per_block], 0 where visible, -inf elsewhere; with ALiBi
            [n * kv_heads, query heads per kv head, m * tokens_per_block], the bias where visible, -inf elsewhere
    """

    rows: torch.Tensor | slice
    pages: torch.Tensor
    mask: torch.Tensor


class TorchPagedAttention:
    """Paged attention in torch over `kv_pool` [num_blocks, layers, 2, kv_heads, tokens_per_block, head_size].

    sink            number of sink tokens; see windows.py
    dtype           of queries, keys and values; None: that of the pool. A pool of float8_e4m3fn has rounded ones, see
                    fp8.py

    Blocks that no query of the step sees are not gathered: they may belong to another sequence and contain NaN, and
    0 * NaN is NaN.
    """

    dispatch = "torch"
    deterministic = False

    def __init__(self, spec: HeadLayout, kv_pool: torch.Tensor, sink: int = 0,
                 dtype: torch.dtype | None = None) -> None:
        num_blocks, num_layers, _, kv_heads, block, head_size = kv_pool.shape
        assert kv_pool.is_contiguous()
        assert (num_layers, kv_heads, head_size) == (spec.num_layers, spec.num_kv_heads, spec.head_size)
        self.heads, self.kv_heads, self.head_size, self.block = spec.num_heads, kv_heads, head_size, block
        self.group = spec.num_heads // kv_heads
        self.attention, self.sink = spec.attention, sink
        # Layers of the same kind share a plan.
        self._kinds = [(layer.window, layer.alibi_slopes, layer.alibi_bfloat16_factor) for layer in spec.attention]
        self.windows = tuple(dict.fromkeys(layer.window for layer in spec.attention))
        self.block_bytes = kv_pool[0, 0].nbytes
        self.dtype, self.device = kv_pool.dtype if dtype is None else dtype, kv_pool.device
        self._fp8 = Fp8Numbers(self.dtype, self.device) if kv_pool.dtype == FP8 else None
        self.scales = [layer.scale if self._fp8 is None else layer.scale * layer.key_scale for layer in spec.attention]
        self._slopes = {slopes: torch.tensor(slopes, dtype=torch.float32, device=self.device).view(kv_heads, self.group)
                        for _, slopes, _ in self._kinds if slopes is not None}
        square = torch.full((TILE_ROWS, TILE_ROWS), -torch.inf, dtype=self.dtype, device=self.device)
        self._ahead, self._window_mask = square.triu(1), square.tril(-1)

        # Views of the pool as rows and as pages, one starting at each layer, so that all layers use the same indices.
        pages = kv_pool.view(-1, block * head_size)
        self.pages_per_layer = 2 * kv_heads
        self.pages_per_block = num_layers * self.pages_per_layer
        self._pages_of_layer_0 = np.arange(self.pages_per_layer).reshape(2, 1, kv_heads, 1)
        self.layer_pages = [pages[layer * self.pages_per_layer :] for layer in range(num_layers)]
        self.layer_pools = kv_pool.unbind(1)
        self.layer_rows = [pool_rows(layer_pool) for layer_pool in self.layer_pools]

    def plan(self, step: PackedStep) -> None:
        self._step_rows = StepRows(torch.from_numpy(step.pool_slots), torch.from_numpy(step.positions).to(torch.int64),
                                   self.layer_pools[0], self.deterministic)
        contexts = {window: [self._plan_context(step, index, window) for index in range(step.num_contexts)]
                    for window in self.windows}
        self._plans = {kind: (contexts[kind[0]], self._plan_generation(step, *kind))
                       for kind in dict.fromkeys(self._kinds)}

    def run(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
            rotary: RotaryTable | None, sink_logits: torch.Tensor | None = None) -> torch.Tensor:
        if self.attention[layer].has_sink_logits != (sink_logits is not None):
            refuse_wrong_sink_logits(layer, self.attention[layer], sink_logits)
        if sink_logits is not None:
            sink_logits = sink_logits.view(self.kv_heads, self.group)
        rows = packed(query, key, value)
        if rotary is not None:
            self._step_rows.rotate(rows[:, : -self.kv_heads], rotary.cos, rotary.sin)
        stored = rows[:, self.heads :]
        if self._fp8 is not None:
            stored = self._fp8.rounded(stored, self.attention[layer].key_scale, self.attention[layer].value_scale)
        self.layer_rows[layer].index_put_((self._step_rows.kv_rows,), stored)
        query, key, value = rows.split_with_sizes([self.heads, self.kv_heads, self.kv_heads], 1)

        contexts, groups = self._plans[self._kinds[layer]]
        if contexts and self._fp8 is not None:
            key, value = self._fp8.widened(stored).chunk(2, 1)
        if not contexts and len(groups) == 1:
            result = self._generate(layer, groups[0], query, sink_logits)
        else:
            result = query.new_empty(len(query), self.heads * self.head_size)
            for context in contexts:
                self._attend(layer, context, query, key, value, result, sink_logits)
            for group in groups:
                result[group.rows] = self._generate(layer, group, query, sink_logits)
        if self._fp8 is not None and self.attention[layer].value_scale != 1.0:
            result.mul_(self.attention[layer].value_scale)
        return result

    def _gathered(self, layer, pages):
        """Return the pages with these numbers, in the dtype of the queries."""
        gathered = self.layer_pages[layer].index_select(0, pages)
        return gathered if self._fp8 is None else self._fp8.widened(gathered)

    def _generate(self, layer, group, query, sink_logits):
        """Return the attention [n, heads * head_size] of the generation rows of a group of n sequences."""
        rows = query[group.rows]
        key, value = self._gathered(layer, group.pages).view(2, len(rows) * self.kv_heads, -1, self.head_size)
        queries = rows.reshape(len(rows) * self.kv_heads, self.group, self.head_size)
        scale, softcap = self.scales[layer], self.attention[layer].softcap
        if softcap is None:
            scores = torch.baddbmm(group.mask, queries, key.transpose(1, 2), alpha=scale)
        else:
            scores = torch.bmm(queries, key.transpose(1, 2)).mul_(scale / softcap).tanh_().mul_(softcap)
            scores.add_(group.mask)
        if sink_logits is not None:
            sink_logits = sink_logits.repeat(len(rows), 1)
        return torch.bmm(_softmax(scores, sink_logits), value).view(len(rows), -1)

    def _attend(self, layer, context, query, key, value, result, sink_logits):
        """Compute the attention of the query rows of one context, and write it to their rows of `result`."""
        if context.pages is None:
            key, value = key[context.rows].transpose(0, 1), value[context.rows].transpose(0, 1)
        else:
            key, value = self._gathered(layer, context.pages).view(2, self.kv_heads, -1, self.head_size)
        scale, softcap = self.scales[layer], self.attention[layer].softcap
        split = (-1, self.kv_heads, self.group, self.head_size)
        for tile in context.tiles:
            rows = query[tile.rows].view(split).permute(1, 2, 0, 3)                    # [kv heads, group, rows, D]
            count = rows.shape[2]
            seen = _seen(key, tile)
            scores = torch.bmm(rows.reshape(self.kv_heads, -1, self.head_size), seen.transpose(1, 2))
            if softcap is None:
                scores.mul_(scale)
            else:
                scores.mul_(scale / softcap).tanh_().mul_(softcap)
            by_row = scores.view(self.kv_heads, self.group, count, -1)
            self._add_positions(layer, tile, by_row)
            by_row[..., -count:].add_(self._ahead[:count, :count])
            if tile.window_mask is not None:
                by_row[..., tile.sinks : tile.sinks + tile.window_mask.shape[1]].add_(tile.window_mask)
            per_row = None if sink_logits is None else sink_logits.repeat_interleave(count, 1)
            attended = torch.bmm(_softmax(scores, per_row), _seen(value, tile))
            result[tile.rows].view(split).copy_(attended.view(rows.shape).permute(2, 0, 1, 3))

    def _add_positions(self, layer, tile, scores):
        """Add the ALiBi bias of the layer, if it has one, to the scores [kv heads, group, rows, keys] of a tile."""
        _, slopes, factor = self._kinds[layer]
        if slopes is None:
            return
        (query, key), count, keys = tile.first, scores.shape[2], scores.shape[3]
        positions = torch.arange(key - tile.sinks, key - tile.sinks + keys, dtype=torch.int64, device=self.device)
        positions[: tile.sinks] = torch.arange(tile.sinks, dtype=torch.int64, device=self.device)
        rows = torch.arange(query, query + count, dtype=torch.int64, device=self.device)
        scores.add_(alibi_bias(positions, rows[:, None], self._slopes[slopes][:, :, None, None], factor))

    def _plan_generation(self, step, window, slopes, factor):
        """Divide the generating sequences into groups of similar length. Returns the _Group of each."""
        lengths = step.kv_lengths[step.num_contexts :].astype(np.int64)
        seen, num_blocks = None, -(-lengths // self.block)
        if window:
            seen = blocks_seen(lengths - 1, lengths, self.block, window, self.sink)
            num_blocks = seen[-1]
        order = np.argsort(num_blocks, kind="stable")[::-1]
        groups, start, padded = [], 0, 0
        for end in range(1, len(order) + 1):
            if end < len(order):
                padded += num_blocks[order[start]] - num_blocks[order[end]]
            if end == len(order) or padded * self.block_bytes > MAX_PADDED_BYTES:
                members = np.sort(order[start:end])
                groups.append(self._plan_group(step, members, lengths, seen, window, slopes, factor))
                start, padded = end, 0
        return groups

    def _plan_context(self, step, index, window):
        begin, end = int(step.query_starts[index]), int(step.query_starts[index + 1])
        length = int(step.kv_lengths[index])
        start = length - (end - begin)
        sinks, skipped, count = blocks_seen(np.int64(start), np.int64(length), self.block, window, self.sink)
        missing = 0 if start == 0 else int(skipped) * self.block         # keys of skipped blocks, not gathered
        tiles = [self._plan_tile(row, min(row + TILE_ROWS, end), start - begin, missing, window)
                 for row in range(begin, end, TILE_ROWS)]
        if start == 0:
            return _Context(slice(begin, end), None, tiles)
        column = np.arange(count)
        column[sinks:] += skipped
        blocks = step.block_tables[index, column].astype(np.int64)
        return _Context(slice(begin, end), self._pages(blocks[None])[0], tiles)

    def _plan_tile(self, row, end, row_to_position, missing, window):
        """Return the _Tile of the rows row, ..., end - 1 of the packed step, which belong to one context.

        row_to_position   number to add to a row to get the position of its token in the sequence
        missing           number of keys that are not gathered for the context. These keys lie between the
                          sink tokens and the windows
        """
        first, stop = row + row_to_position, end + row_to_position                    # positions
        if window and first - window + 1 > self.sink:
            # The sinks are separate. The window of each row starts one key later than the window of the previous row.
            keys = slice(first - window + 1 - missing, stop - missing)
            return _Tile(slice(row, end), self.sink, keys, self._window_mask[: end - row, : end - row],
                         (first, first - window + 1))
        window_mask = None
        if window and stop - window > self.sink:
            key = torch.arange(stop - window, dtype=torch.int64, device=self.device)
            query = torch.arange(first, stop, dtype=torch.int64, device=self.device)[:, None]
            outside = (key <= query - window) & (key >= self.sink)
            window_mask = torch.zeros(outside.shape, dtype=self.dtype, device=self.device)
            window_mask.masked_fill_(outside, -torch.inf)
        return _Tile(slice(row, end), 0, slice(stop), window_mask, (first, 0))

    def _plan_group(self, step, members, lengths, seen, window, slopes, factor):
        """Return the _Group of some generating sequences.

        members   [n] indices of the group's sequences among all generating sequences of the step
        lengths   number of tokens in the KV cache for each generating sequence of the step
        seen      result of `blocks_seen` for all generating sequences: the numbers of sink blocks, of skipped
                  blocks and of all blocks that the query sees; None without a window
        """
        lengths, indices = lengths[members, None], step.num_contexts + members
        last = (lengths - 1) // self.block
        if seen is None:
            column = np.arange(last.max() + 1)[None]
        else:
            sinks, skipped, count = (array[members, None] for array in seen)
            index = np.arange(count.max())
            column = index + skipped * (index >= sinks)
        # Padding repeats the last block of the same sequence: another block may hold NaN.
        blocks = step.block_tables[indices[:, None], np.minimum(column, last)].astype(np.int64)

        key_position = (column[:, :, None] * self.block + np.arange(self.block)).reshape(len(column), -1)
        visible = key_position < lengths
        if window:
            visible &= (key_position >= lengths - window) | (key_position < self.sink)
        mask = np.where(visible, np.float32(0), np.float32(-np.inf)).repeat(self.kv_heads, axis=0)[:, None]
        mask = self._upload(mask)
        if slopes is not None:
            bias = alibi_bias(self._upload(key_position[:, None, None]), self._upload(lengths[..., None, None] - 1),
                              self._slopes[slopes][:, :, None], factor)
            mask = mask + bias.view(len(mask), self.group, -1)

        rows = step.query_starts[indices].astype(np.int64)
        whole = len(rows) == rows[-1] - rows[0] + 1
        return _Group(slice(int(rows[0]), int(rows[-1]) + 1) if whole else self._upload(rows),
                      self._pages(blocks).view(-1), mask.to(self.dtype))

    def _pages(self, blocks):
        """Return the page numbers in layer 0 for the block ids [n, m], as one row.

        The order is that of an array [2 (key or value), n, kv_heads, m].
        """
        pages = blocks[:, None] * self.pages_per_block + self._pages_of_layer_0
        return self._upload(pages.reshape(1, -1))

    def _upload(self, array):
        return torch.from_numpy(np.ascontiguousarray(array)).to(self.device)


def _softmax(scores: torch.Tensor, sink_logits: torch.Tensor | None) -> torch.Tensor:
    """Return the softmax of `scores`, which has three dimensions, over the last dimension.

    sink_logits   one more score for each row, which counts in the sum but has no weight in the result; None: no such
                  score
    """
    if sink_logits is None:
        return scores.softmax(-1)
    return torch.cat([scores, sink_logits[..., None].to(scores.dtype)], -1).softmax(-1)[..., :-1]


def _seen(whole: torch.Tensor, tile: _Tile) -> torch.Tensor:
    """Return the keys or values that a tile sees, selected from `whole` [heads, n, head_size]."""
    seen = whole[:, tile.keys]
    return torch.cat([whole[:, : tile.sinks], seen], dim=1) if tile.sinks else seen
