"""Deterministic paged attention in torch, for `deterministic` on a CPU. The bits of a row do not depend on the step.

Attention is computed in four stages:

    keys      The keys are divided into tiles of fixed size, counted from position 0 of the sequence.
    scores    Each tile takes one matrix product. The maximum of a row over all tiles does not depend on their order.
    weights   The exp of the scores is computed elementwise. The exps of a tile are summed in pieces of fixed shape.
    values    Each tile takes one matrix product. The partial results are added one by one, from first tile to last.

A tile that a row does not see adds zeros, which leaves the bits unchanged. Rows of different lengths can therefore
share products. Generation rows and rows of a prompt go through the same stages. Everything is computed in float32.

The matrix products are batched (torch.bmm). The height of a product is its number of query rows. `_find_counts`
measures on this machine which heights, and which numbers of products per call, give the same bits. Attention uses only
these.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from ..errors import ConfigError, counted
from ..triton_kernels.cpu.fixed_pieces import agreeing_sizes, elementwise, in_pieces, row_by_row
from .alibi import alibi_bias
from .interface import HeadLayout, PackedStep
from .torch_paged import TorchPagedAttention
from .windows import blocks_seen

MIN_TILE_KEYS = 64                          # keys per tile; a block with more tokens is one tile
CONTEXT_ROWS = 64                           # query rows of a context product: positions times heads of a group
PRODUCT_COUNTS = (1, 4, 16, 64, 256)        # products per call

# Results of `_find_counts`, cached for the process. The keys have all values on which the results depend.
_found: dict[tuple, tuple[int, dict[int, tuple[int, ...]]]] = {}


@dataclass(slots=True)
class _RowTile:
    """Consecutive query rows of a context, and the key tiles that they see.

    rows    packed rows of the queries
    keys    range of the context's gathered key tiles; it includes all tiles that the rows can see
    mask    [n, 1, positions, 1, tile] float32, for the last n key tiles of `keys`: 0 where visible, -inf elsewhere.
            The rows see all keys of the earlier tiles of `keys`. In these shapes, `positions` is the number of
            query positions of a tile
    positions   two int64 tensors: positions of the keys [tiles, 1, 1, 1, 1, tile], and of the rows [positions, 1, 1];
                None: no layer needs them
    """

    rows: slice
    keys: slice
    mask: torch.Tensor
    positions: tuple[torch.Tensor, torch.Tensor] | None


@dataclass(slots=True)
class _Context:
    """The query rows of one context, in tiles, and the pages that they read.

    pages   page numbers in the order (key or value, tile, head, page of the tile)
    """

    pages: torch.Tensor
    tiles: list[_RowTile]


@dataclass(slots=True)
class _Group:
    """Generation rows of n sequences of similar length, which are computed together.

    rows    [n] int64: the packed row of each sequence; a slice if these rows are consecutive
    pages   page numbers in the order (key or value, tile, sequence, head, page of the tile)
    mask    [tiles, n, 1, 1, tile] float32, 0 where visible, -inf elsewhere
    positions   two int64 tensors: positions of the keys [tiles, n, 1, 1, 1, tile], and of the rows [n, 1, 1, 1, 1];
                None if no layer needs them
    """

    rows: torch.Tensor | slice
    pages: torch.Tensor
    mask: torch.Tensor
    positions: tuple[torch.Tensor, torch.Tensor] | None


class FixedTileAttention(TorchPagedAttention):
    """A deterministic and slower form of TorchPagedAttention."""

    deterministic = True

    def __init__(self, spec: HeadLayout, kv_pool: torch.Tensor, sink: int = 0,
                 dtype: torch.dtype | None = None) -> None:
        super().__init__(spec, kv_pool, sink, dtype)
        self.tile = max(MIN_TILE_KEYS, self.block)
        self.pages_per_tile = self.tile // self.block
        # A power of two, so that a product has about CONTEXT_ROWS rows.
        self.tile_positions = 1 << max(CONTEXT_ROWS // self.group, 1).bit_length() - 1
        self._counts: dict[int, tuple[int, ...]] | None = None

    def plan(self, step: PackedStep) -> None:
        if self._counts is None:
            # Measured in the first step of the engine, on the threads that compute all later steps.
            key = (self.group, self.head_size, self.tile, self.device, torch.get_num_threads())
            if key not in _found:
                _found[key] = self._find_counts()
            self._fewest_rows, self._counts = _found[key]
        super().plan(step)

    # ------------------------------------------------------------------ per layer

    def _generate(self, layer, group, query, sink_logits):
        """Return the attention [n, heads * head_size] of the generation rows of a group of n sequences."""
        rows = query[group.rows].float()
        count = len(rows)
        key, value = self._gather(layer, group.pages, count * self.kv_heads)
        queries = _padded_rows(rows.reshape(count * self.kv_heads, self.group, self.head_size), self._fewest_rows)
        attended = self._attend_tiles(layer, queries, key, value, group, (count, self.kv_heads), sink_logits)
        return attended[:, : self.group].reshape(count, -1).to(query.dtype)

    def _attend(self, layer, context, query, key, value, result, sink_logits):
        """Compute the attention of the query rows of one context, and write it to their rows of `result`."""
        key, value = self._gather(layer, context.pages, self.kv_heads)
        positions, height = self.tile_positions, self.tile_positions * self.group
        for tile in context.tiles:
            rows = query[tile.rows].float()
            count = len(rows)
            rows = functional.pad(rows, [0, 0, 0, 0, 0, positions - count])
            queries = rows.view(positions, self.kv_heads, self.group, self.head_size).transpose(0, 1)
            attended = self._attend_tiles(layer, queries.reshape(self.kv_heads, height, self.head_size),
                                          key[tile.keys], value[tile.keys], tile, (1, self.kv_heads), sink_logits)
            attended = attended.view(self.kv_heads, positions, self.group, self.head_size)[:, :count]
            result[tile.rows].view(count, self.kv_heads, self.group, -1).copy_(attended.transpose(0, 1))

    def _gather(self, layer, pages, per_tile):
        """Return the keys and values of `pages`, each [tiles, per_tile, self.tile, head_size] float32.

        per_tile   number of sequences times number of kv heads
        """
        gathered = self._gathered(layer, pages).float()
        return gathered.view(2, -1, per_tile, self.tile, self.head_size)

    def _attend_tiles(self, layer, queries, key, value, planned, units, sink_logits):
        """Return the attention of queries [u, rows, head_size] over key and value [tiles, u, tile, head_size].

        planned       the _Group or _RowTile of the queries
        units         (number of sequences, number of kv heads); u is their product
        sink_logits   [kv heads, group] the sink logit of each query head; None: no sink logits
        """
        num_tiles, (count, height, _), mask = len(key), queries.shape, planned.mask
        counts = self._counts[height]
        scores = in_pieces(_scores, queries.expand(num_tiles, -1, -1, -1).flatten(0, 1), key.flatten(0, 1),
                           sizes=counts)
        scale, softcap = self.scales[layer], self.attention[layer].softcap
        if softcap is None:
            scores.mul_(scale)
        else:
            scores = elementwise(torch.tanh, scores.mul_(scale / softcap)).mul_(softcap)
        by_tile = scores.view(num_tiles, count, height, self.tile)
        positions = mask.shape[2]
        _, slopes, factor = self._kinds[layer]
        if slopes is not None:
            row_slopes = self._per_row(self._slopes[slopes], height // positions)[:, None]
            bias = alibi_bias(*planned.positions, row_slopes, factor)
            by_tile.view(num_tiles, *units, positions, -1, self.tile).add_(bias)
        masked = by_tile[num_tiles - len(mask) :]
        masked.view(len(mask), *units, positions, -1, self.tile).add_(mask[:, :, None])
        top = by_tile.amax((0, 3), keepdim=True)
        if sink_logits is not None:
            row_logits = self._per_row(sink_logits, height).float().expand(*units, height, 1)
            row_logits = row_logits.reshape(count, height, 1)
            top = torch.maximum(top, row_logits)
        by_tile.sub_(top)

        weights = elementwise(torch.exp, scores)
        parts = in_pieces(torch.bmm, weights, value.flatten(0, 1), sizes=counts)
        sums = row_by_row(_sum, weights.view(-1, self.tile))
        parts, sums = parts.view(num_tiles, count, height, -1), sums.view(num_tiles, count, height, 1)
        attended, total = parts[0], sums[0]
        for part, part_sum in zip(parts[1:], sums[1:]):
            attended.add_(part)
            total.add_(part_sum)
        if sink_logits is not None:
            total.add_(elementwise(torch.exp, row_logits - top[0]))
        return attended.div_(total)

    def _per_row(self, per_head, count):
        """Return the entry of `per_head` for the query head of each row, [kv heads, count, 1].

        per_head   [kv heads, group] a value for each query head, such as its sink logit
        count      number of rows of each kv head. The entries of padding rows are arbitrary
        """
        head = torch.arange(count, dtype=torch.int64, device=self.device) % self.group
        return per_head[:, head, None]

    # ------------------------------------------------------------------ per step

    def _plan_context(self, step, index, window):
        begin, end = int(step.query_starts[index]), int(step.query_starts[index + 1])
        length = int(step.kv_lengths[index])
        start = length - (end - begin)
        tiles_read = self._tiles_read(np.array([start]), np.array([length]), window)[0]
        pages = self._tile_pages(step, np.array([index]), np.array([start]), np.array([length]), tiles_read[None],
                                 window)
        tiles = []
        for first in range(start, length, self.tile_positions):
            last = min(first + self.tile_positions, length) - 1
            # Without a window, tiles before the tile of the first position need no mask: every row sees all their keys.
            stop = int(np.searchsorted(tiles_read, last // self.tile, side="right"))
            begin_mask = 0 if window else first // self.tile
            begin_keys = 0
            if window and not self.sink:
                begin_keys = begin_mask = int(np.searchsorted(tiles_read, max(first - window + 1, 0) // self.tile))
            position = np.minimum(first + np.arange(self.tile_positions), last)[None, :, None]
            key = (tiles_read[begin_mask:stop, None] * self.tile + np.arange(self.tile))[:, None]
            mask = _mask(key, position, window, self.sink)[:, None, :, None]
            rows = slice(begin + first - start, begin + last + 1 - start)
            seen = tiles_read[begin_keys:stop].reshape(-1, 1, 1, 1, 1, 1) * self.tile + np.arange(self.tile)
            tiles.append(_RowTile(rows, slice(begin_keys, stop), self._upload(mask),
                                  self._positions(seen, position.reshape(-1, 1, 1))))
        return _Context(pages, tiles)

    def _positions(self, key, query):
        """Return the key and query positions on the device; None if no layer needs them."""
        return (self._upload(key), self._upload(query)) if self._slopes else None

    def _plan_group(self, step, members, lengths, seen, window, slopes, factor):
        lengths = lengths[members]
        tiles = self._tiles_read(lengths - 1, lengths, window)
        indices = step.num_contexts + members
        pages = self._tile_pages(step, indices, lengths - 1, lengths, tiles, window)
        key = tiles[:, :, None] * self.tile + np.arange(self.tile)                             # [n, tiles, tile]
        mask = _mask(key, lengths[:, None, None] - 1, window, self.sink).swapaxes(0, 1)[:, :, None, None]

        rows = step.num_context_tokens + members
        whole = len(rows) == rows[-1] - rows[0] + 1
        positions = self._positions(key.swapaxes(0, 1)[:, :, None, None, None], (lengths - 1).reshape(-1, 1, 1, 1, 1))
        return _Group(slice(int(rows[0]), int(rows[-1]) + 1) if whole else self._upload(rows), pages,
                      self._upload(mask), positions)

    def _tiles_read(self, first_position, length, window):
        """Return the indices [n, m] of the key tiles that each of n sequences reads, ascending.

        The row of a shorter sequence is padded with the indices of later tiles, which the mask hides.
        """
        last = (length - 1) // self.tile
        if not window:
            return np.broadcast_to(np.arange(last.max() + 1), (len(last), int(last.max()) + 1))
        first = np.maximum(first_position - window + 1, 0) // self.tile
        sinks = np.minimum(-(-self.sink // self.tile), first)
        index = np.arange((last + 1 - first + sinks).max())
        return index + ((first - sinks)[:, None] * (index >= sinks[:, None]))

    def _tile_pages(self, step, indices, first_position, length, tiles, window):
        """Return the page numbers of the key tiles `tiles` [n, m] of n sequences, for layer 0.

        The order is (key or value, tile, sequence, head, page of the tile).

        In the block table of a sequence, an entry past the end of the sequence may be a block of another sequence.
        The same is true of an entry that the sequence no longer sees. Such entries are replaced by the last block
        of the sequence to which the table belongs.
        """
        own_last = ((length - 1) // self.block)[:, None, None]
        column = tiles[:, :, None] * self.pages_per_tile + np.arange(self.pages_per_tile)
        sinks, skipped, _ = (array[:, None, None] for array in blocks_seen(
            first_position, length, self.block, window, self.sink))
        unread = (column > own_last) | ((column >= sinks) & (column < sinks + skipped))
        column = np.where(unread, own_last, column)
        blocks = step.block_tables[indices[:, None, None], column].astype(np.int64)            # [n, m, pages]
        kind = np.arange(2)[:, None, None, None, None] * self.kv_heads
        head = np.arange(self.kv_heads)[:, None]
        pages = blocks.swapaxes(0, 1)[:, :, None] * self.pages_per_block + kind + head
        return self._upload(pages.reshape(-1))

    # ------------------------------------------------------------------ once

    def _find_counts(self) -> tuple[int, dict[int, tuple[int, ...]]]:
        """Measure which shapes of a batched matrix product give the same bits as a reference call.

        A shape consists of a height and a count. The height is the number of query rows of each product. The count
        is the number of products per call. The reference call has the height of a context's products, and the
        largest count in PRODUCT_COUNTS.

        Returns   (the height for generation rows, height -> counts that give the bits of the reference). The height
                  for generation rows is the lowest tested height that gives the bits of the reference. The mapping
                  has this height and the height of a context's products
        Raises    ConfigError if the bits depend on the row index
        """
        height, count = self.tile_positions * self.group, PRODUCT_COUNTS[-1]
        generator = torch.Generator("cpu").manual_seed(0)

        def random(*shape):
            return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(self.device)

        queries, keys = random(count, height, self.head_size), random(count, self.tile, self.head_size)
        weights, values = random(count, height, self.tile).abs_(), random(count, self.tile, self.head_size)
        kinds = ((_scores, queries, keys), (torch.bmm, weights, values))
        expected = [in_pieces(product, rows, others, sizes=(count,)) for product, rows, others in kinds]

        def agreeing(rows_height):
            """Return the counts with which products of `rows_height` rows give the bits of the reference call.

            A count is a number of products per call. The rows of each product are the first `rows_height` query
            rows of a product of the reference call. Returns () if these rows get other bits even with the count of
            the reference call.
            """
            found = set(PRODUCT_COUNTS)
            for (product, rows, others), whole in zip(kinds, expected):
                rows = rows[:, :rows_height]
                if not torch.equal(in_pieces(product, rows, others, sizes=(count,)), whole[:, :rows_height]):
                    return ()
                found &= set(agreeing_sizes(product, rows, others, sizes=PRODUCT_COUNTS))
            return tuple(sorted(found))

        counts = {height: agreeing(height)}
        order = torch.arange(height, dtype=torch.int64, device=self.device).roll(1)
        rows_agree = all(torch.equal(in_pieces(product, rows[:, order], others, sizes=(count,)), whole[:, order])
                         for (product, rows, others), whole in zip(kinds, expected))
        if not counts[height] or not rows_agree:
            raise ConfigError(
                "deterministic is set, but the bits of a row depend on its index in attention's matrix products of "
                f"{counted(height, 'row')} on {counted(torch.get_num_threads(), 'thread')} of this machine",
                "expected the same bits at every row index", "try another num_threads, or turn deterministic off")
        lower = [1 << power for power in range(height.bit_length()) if self.group <= 1 << power < height]
        for rows_height in [self.group, *lower]:
            if found := agreeing(rows_height):
                return rows_height, {**counts, rows_height: found}
        return height, counts


def _scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    return torch.bmm(queries, keys.transpose(1, 2))


def _sum(rows: torch.Tensor) -> torch.Tensor:
    return rows.sum(1)


def _padded_rows(rows: torch.Tensor, height: int) -> torch.Tensor:
    """Return rows [u, r, head_size], padded with zeros to [u, height, head_size] if r is smaller than `height`."""
    return functional.pad(rows, [0, 0, 0, height - rows.shape[1]]) if rows.shape[1] < height else rows


def _mask(key: np.ndarray, position: np.ndarray, window: int | None, sink: int) -> np.ndarray:
    """Return a float32 mask: 0 where the query at `position` sees `key`, -inf elsewhere."""
    visible = key <= position
    if window:
        visible &= (key > position - window) | (key < sink)
    return np.where(visible, np.float32(0), np.float32(-np.inf))
