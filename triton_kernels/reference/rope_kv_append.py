"""Norm and rotate the queries and keys of a step, and write keys and values to the paged pool.

Arguments, results and rules are those of the kernel, in triton_kernels/rope_kv_append.py.
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
