"""Norm and rotate the queries and keys of a step, and write keys and values to the paged pool.

    x1, x2 = the first and the second half of the leading R entries of a head
    rotated = [x1 * cos - x2 * sin, x2 * cos + x1 * sin, the other D - R entries unchanged]
    with norms, a head x is first replaced by x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight), where weight is
    query_norm or key_norm; rounded to the dtype of x
    pool[slot // B, 0, h, slot % B] = rotated key,  pool[slot // B, 1, h, slot % B] = value     if slot >= 0

Shapes      query                    [T, HQ, D]   T packed tokens, HQ query heads of size D; heads contiguous, any row
                                                  stride
            key, value               [T, HK, D]   HK key heads; strides as for query. All three may be views of one
                                                  packed tensor
            kv_pool                  [N, 2, HK, B, D]   the pool of one layer: N blocks of B tokens; in the dtype of the
                                                        keys, or in e4m3 (torch.float8_e4m3fn)
            slot_mapping             [T] int64   entry of each token in the pool, block * B + offset; -1 = do not write
            positions                [T] int32 or int64   a valid position for every row, padding included
            cos_table, sin_table     [positions, R / 2] float32   None: no rotation
            query_out                [T, HQ, D]   None: change the queries in place
            query_norm, key_norm     [D]   weights of the RMS norms of query and key heads; None: no norms
Options     deterministic: make the bits of a row depend on that row alone. The Triton kernel does so in any case
            key_scale, value_scale: a pool in e4m3 stores keys and values, in their dtype, divided by them and
            rounded, see fp8.py; 1 for a pool in another dtype
Mutates     kv_pool and query_out (or query). No two rows may have the same slot, except -1.
Returns     the rotated queries.
"""

import torch

from .rms_norm import rms_norm


def _rotate(rows, positions, cos_table, sin_table):
    """Return `rows` [T, H, D] rotated, in float32 or wider."""
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    half = cos_table.shape[1]
    cos = cos_table[positions.long()].to(wide.dtype)[:, None, :]
    sin = sin_table[positions.long()].to(wide.dtype)[:, None, :]
    first, second, rest = wide[..., :half], wide[..., half : 2 * half], wide[..., 2 * half :]
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=-1)


def stored(rows, scale, dtype):
    """Return `rows` divided by `scale`, at least in float32, in the dtype of a pool."""
    if scale != 1.0:
        rows = rows.to(torch.promote_types(rows.dtype, torch.float32)) / scale
    if dtype == torch.float8_e4m3fn:
        rows = rows.clamp(-448.0, 448.0)                   # without it, torch turns larger numbers into NaN
    return rows.to(dtype)


def rope_kv_append(
    query, key, value, kv_pool, slot_mapping, positions=None, cos_table=None, sin_table=None, query_out=None,
    deterministic=False, query_norm=None, key_norm=None, epsilon=0.0, weight_offset=0.0,
    key_scale=1.0, value_scale=1.0,
):
    """Norm and rotate queries and keys, then append keys and values. See the module docstring for shapes."""
    if query_out is None:
        query_out = query
    if query_norm is not None:
        query, key = (rms_norm(rows, weight, epsilon, weight_offset=weight_offset)
                      for rows, weight in ((query, query_norm), (key, key_norm)))
    if cos_table is not None:
        rotated_query = _rotate(query, positions, cos_table, sin_table)
        key = _rotate(key, positions, cos_table, sin_table)
    else:
        rotated_query = query
    if query_out is not rotated_query:
        query_out.copy_(rotated_query)

    tokens_per_block = kv_pool.shape[3]
    kept = slot_mapping >= 0
    block, offset = slot_mapping[kept] // tokens_per_block, slot_mapping[kept] % tokens_per_block
    kv_pool[block, 0, :, offset] = stored(key[kept].to(value.dtype), key_scale, kv_pool.dtype)
    kv_pool[block, 1, :, offset] = stored(value[kept], value_scale, kv_pool.dtype)
    return query_out
