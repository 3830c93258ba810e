"""Rotation and cache writes on a CPU. The contract is that of triton_kernels/rope_kv_append.py.

What all layers of a step share, the rows of the tables and the places in the pool, is computed once: `StepRows` holds
it, and attention on a CPU keeps one for a step. The function does one layer with one of its own.
"""

import functools

import torch


class StepRows:
    """The tokens of one step: their positions, and where their keys and values go.

    slot_mapping    [T] int64   as in the kernel, without -1
    positions       [T] int64   None: nothing is rotated
    kv_pool         [N, 2, HK, B, D]   the view of any layer: all have its strides
    deterministic   a row's bits depend on that row alone: a product fused into a sum is rounded once where a loop is
                    vectorised and twice in its tail, so that there are no fused ones
    """

    def __init__(self, slot_mapping, positions, kv_pool, deterministic=False):
        kv_heads, tokens_per_block, head_size = kv_pool.shape[2:]
        # In numpy, whose operations on a few integers take a third of torch's time: [T, 2 HK], of a layer's rows.
        block, offset = divmod(slot_mapping.numpy(), tokens_per_block)
        first_row = block * (kv_pool.stride(0) // head_size) + offset
        self._pool_rows = torch.from_numpy(first_row[:, None] + _rows_of_heads(2 * kv_heads, tokens_per_block))
        self._positions, self._deterministic = positions, deterministic
        self._table = self._cos = self._sin = None

    def rotate(self, query, key, cos_table, sin_table):
        """Both rotated, overwritten where they can be. Layers that share a table share its rows."""
        if self._table is not cos_table:
            cos, sin = cos_table.index_select(0, self._positions), sin_table.index_select(0, self._positions)
            self._cos = torch.cat([cos, cos], dim=-1)[:, None].to(query.dtype)
            self._sin = torch.cat([-sin, sin], dim=-1)[:, None].to(query.dtype)
            self._table = cos_table
        if self._deterministic:
            return self._rotate_unfused(query), self._rotate_unfused(key)
        both, size = _neighbours(query, key), self._cos.shape[-1]
        part = both if size == both.shape[-1] else both[..., :size]
        turned = part.roll(size // 2, -1).mul_(self._sin)
        torch.addcmul(turned, part, self._cos, out=part)
        heads = query.shape[1]
        return both[:, :heads], both[:, heads:]

    def append(self, pool_rows, key, value):
        """Write rotated keys, and values, into one layer's rows of the pool, as `pool_rows` gives them."""
        pool_rows.index_put_((self._pool_rows,), _neighbours(key, value))

    def _rotate_unfused(self, rows):
        size = self._cos.shape[-1]
        part = rows[..., :size]
        rotated = (part * self._cos).add_(part.roll(size // 2, -1).mul_(self._sin))
        return rotated if size == rows.shape[-1] else torch.cat([rotated, rows[..., size:]], dim=-1)


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
    step = StepRows(slot_mapping, None if positions is None else positions.long(), kv_pool, deterministic)
    rotated = query
    if cos_table is not None:
        rotated, key = step.rotate(query.clone(), key.clone(), cos_table, sin_table)
    kept = slot_mapping >= 0
    if not kept.all():
        step, key, value = StepRows(slot_mapping[kept], None, kv_pool), key[kept], value[kept]
    step.append(pool_rows(kv_pool), key.to(kv_pool.dtype), value.to(kv_pool.dtype))
    query_out = query if query_out is None else query_out
    return query_out if query_out is rotated else query_out.copy_(rotated)


@functools.lru_cache(maxsize=64)
def _rows_of_heads(heads, tokens_per_block):
    return (torch.arange(heads, dtype=torch.int64, device="cpu") * tokens_per_block).numpy()


def _neighbours(first, second):
    """[T, a, D] and [T, b, D] as [T, a + b, D]: a view when `second` starts where a row of `first` ends."""
    tokens, heads, size = first.shape
    if (second.stride() == first.stride() and second.dtype == first.dtype
            and second.storage_offset() == first.storage_offset() + heads * size
            and second.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()):
        return first.as_strided((tokens, heads + second.shape[1], size), first.stride())
    return torch.cat([first, second], dim=1)
