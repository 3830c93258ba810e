"""Rotation and cache writes on a CPU. The contract is that of triton_kernels/rope_kv_append.py.

What all layers of a step share, the rows of the tables and the places in the pool, is computed once: `StepRows` holds
it, and attention on a CPU keeps one for a step. The function does one layer with one of its own.
"""

import functools

import torch


class StepRows:
    """The tokens of one step: their positions, and where their keys and values go.

    slot_mapping    [T] int64   as in the kernel; what the places of a -1 are means nothing
    positions       [T] int64   None: nothing is rotated
    kv_pool         [N, 2, HK, B, D]   the view of any layer: all have its strides
    deterministic   a row's bits depend on that row alone: a product fused into a sum is rounded once where a loop is
                    vectorised and twice in its tail, so that there are no fused ones

    places          [T, 2 HK] int64: the row of each key and each value among a layer's `pool_rows`
    """

    def __init__(self, slot_mapping, positions, kv_pool, deterministic=False):
        kv_heads, tokens_per_block, head_size = kv_pool.shape[2:]
        # In numpy, whose operations on a few integers take a third of torch's time.
        block, offset = divmod(slot_mapping.numpy(), tokens_per_block)
        first_row = block * (kv_pool.stride(0) // head_size) + offset
        self.places = torch.from_numpy(first_row[:, None] + _rows_of_heads(2 * kv_heads, tokens_per_block))
        self._positions, self._deterministic = positions, deterministic
        self._table = self._cos = self._sin = None

    def rotate(self, rows, cos_table, sin_table):
        """Rotate `rows` [T, H, D], queries or keys or both, in place. Layers that share a table share its rows."""
        if self._table is not cos_table:
            cos, sin = cos_table.index_select(0, self._positions), sin_table.index_select(0, self._positions)
            self._cos = torch.cat([cos, cos], dim=-1)[:, None].to(rows.dtype)
            self._sin = torch.cat([-sin, sin], dim=-1)[:, None].to(rows.dtype)
            self._table = cos_table
        size = self._cos.shape[-1]
        part = rows if size == rows.shape[-1] else rows[..., :size]
        turned = part.roll(size // 2, -1).mul_(self._sin)
        if self._deterministic:
            part.mul_(self._cos).add_(turned)
        else:
            torch.addcmul(turned, part, self._cos, out=part)


def packed(query, key, value):
    """Queries [T, HQ, D], then keys, then values [T, HK, D] as [T, HQ + 2 HK, D]: the tensor that the three are views
    of, where they adjoin in one, else a copy."""
    tokens, heads, size = query.shape
    start, stride, kv_heads = query.storage_offset() + heads * size, query.stride(), key.shape[1]
    memory = query.untyped_storage().data_ptr()
    if (key.storage_offset() == start and value.storage_offset() == start + kv_heads * size
            and stride == key.stride() == value.stride() and query.dtype == key.dtype == value.dtype
            and memory == key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()):
        return query.as_strided((tokens, heads + 2 * kv_heads, size), stride)
    return torch.cat([query, key, value], dim=1)


def pool_rows(kv_pool):
    """One layer's view [N, 2, HK, B, D] of the pool as rows [.., D] from its first entry to the end of the memory."""
    size = kv_pool.shape[-1]
    count = kv_pool.untyped_storage().nbytes() // kv_pool.element_size() - kv_pool.storage_offset()
    return kv_pool.as_strided((count // size, size), (size, 1))


def rope_kv_append(
    query, key, value, kv_pool, slot_mapping, positions=None, cos_table=None, sin_table=None, query_out=None,
    deterministic=False,
):
    """Rotate, then append; see the kernel's docstring for shapes. Returns the rotated queries."""
    heads, kv_heads = query.shape[1], key.shape[1]
    step = StepRows(slot_mapping, None if positions is None else positions.long(), kv_pool, deterministic)
    rows = torch.cat([query, key, value], dim=1)
    if cos_table is not None:
        step.rotate(rows[:, : heads + kv_heads], cos_table, sin_table)
    kept = slot_mapping >= 0
    pool_rows(kv_pool).index_put_((step.places[kept],), rows[kept, heads:].to(kv_pool.dtype))
    return (query if query_out is None else query_out).copy_(rows[:, :heads])


@functools.lru_cache(maxsize=64)
def _rows_of_heads(heads, tokens_per_block):
    return (torch.arange(heads, dtype=torch.int64, device="cpu") * tokens_per_block).numpy()
