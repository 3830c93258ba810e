"""Rotation and cache writes on a CPU. Same contract as triton_kernels/rope_kv_append.py.

`StepRows` holds the rows of the rotary tables and the rows of the pool, which all layers of a step share. Attention on
a CPU keeps one `StepRows` for each step. `rope_kv_append` handles one layer and creates a `StepRows` for it.
"""

import functools

import torch

from ..reference.rope_kv_append import stored
from .rms_norm import rms_norm


class StepRows:
    """The rows of the rotary tables and of the pool for the tokens of one step.

    slot_mapping    [T] int64   as in triton_kernels/rope_kv_append.py; `kv_rows` is undefined for entries of -1
    positions       [T] int64   position of each token; None: `rotate` is not called
    kv_pool         [N, 2, HK, B, D]   the pool of any one layer: all layers have the same strides
    deterministic   make the bits of a row depend on that row alone. `addcmul` is then not used: it rounds once in the
                    vectorized part of its loop and twice in the tail

    kv_rows         [T, 2 HK] int64: the row of each key and value in the `pool_rows` of a layer
    """

    def __init__(self, slot_mapping, positions, kv_pool, deterministic=False):
        kv_heads, tokens_per_block, head_size = kv_pool.shape[2:]
        # numpy takes a third of torch's time for operations on a few integers.
        block, offset = divmod(slot_mapping.numpy(), tokens_per_block)
        first_row = block * (kv_pool.stride(0) // head_size) + offset
        self.kv_rows = torch.from_numpy(first_row[:, None] + _rows_of_heads(2 * kv_heads, tokens_per_block))
        self._positions, self._deterministic = positions, deterministic
        self._table = self._cos = self._sin = None

    def rotate(self, rows, cos_table, sin_table):
        """Rotate `rows` [T, H, D] (queries, keys or both) in place.

        The first of successive calls with the same `cos_table` gathers the rows of both tables. The others reuse them.
        """
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
    """Concatenate queries [T, HQ, D], keys and values [T, HK, D] to [T, HQ + 2 HK, D].

    Returns a view if the three are adjacent views of one tensor, else a copy.
    """
    tokens, heads, size = query.shape
    start, stride, kv_heads = query.storage_offset() + heads * size, query.stride(), key.shape[1]
    memory = query.untyped_storage().data_ptr()
    if (key.storage_offset() == start and value.storage_offset() == start + kv_heads * size
            and stride == key.stride() == value.stride() and query.dtype == key.dtype == value.dtype
            and memory == key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()):
        return query.as_strided((tokens, heads + 2 * kv_heads, size), stride)
    return torch.cat([query, key, value], dim=1)


def pool_rows(kv_pool):
    """View the storage of `kv_pool`, the pool of one layer [N, 2, HK, B, D], as rows [.., D].

    The view begins at the first entry of `kv_pool` and ends with the storage, so it can contain rows of other layers.
    """
    size = kv_pool.shape[-1]
    count = kv_pool.untyped_storage().nbytes() // kv_pool.element_size() - kv_pool.storage_offset()
    return kv_pool.as_strided((count // size, size), (size, 1))


def rope_kv_append(
    query, key, value, kv_pool, slot_mapping, positions=None, cos_table=None, sin_table=None, query_out=None,
    deterministic=False, query_norm=None, key_norm=None, epsilon=0.0, weight_offset=0.0,
    key_scale=1.0, value_scale=1.0,
):
    """Norm and rotate queries and keys, then append keys and values. Returns the rotated queries.

    See triton_kernels/rope_kv_append.py for shapes.
    """
    heads, kv_heads = query.shape[1], key.shape[1]
    step = StepRows(slot_mapping, None if positions is None else positions.long(), kv_pool, deterministic)
    normed = [query, key]
    if query_norm is not None:
        normed = [rms_norm(part, weight, epsilon, weight_offset=weight_offset, deterministic=deterministic)
                  for part, weight in ((query, query_norm), (key, key_norm))]
    rows = torch.cat([*normed, value], dim=1)
    if cos_table is not None:
        step.rotate(rows[:, : heads + kv_heads], cos_table, sin_table)
    kept = slot_mapping >= 0
    keys, values = rows[kept, heads:].chunk(2, 1)
    pool_rows(kv_pool).index_put_((step.kv_rows[kept],), torch.cat([
        stored(keys, key_scale, kv_pool.dtype), stored(values, value_scale, kv_pool.dtype)], 1))
    return (query if query_out is None else query_out).copy_(rows[:, :heads])


@functools.lru_cache(maxsize=64)
def _rows_of_heads(heads, tokens_per_block):
    return (torch.arange(heads, dtype=torch.int64, device="cpu") * tokens_per_block).numpy()
