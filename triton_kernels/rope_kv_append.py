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
Oracle      triton_kernels/reference/rope_kv_append.py
Source      rotary embedding (Su et al. 2021) in the half-split arrangement; written for this project.

One program per token and kv head, with the G = HQ / HK query heads of its group. A program moves G + 2 heads; a step
of a single token still uses HK programs.
"""

import triton
import triton.language as tl

from .fp8 import entries_of, narrowed
from .strides import heads_contiguous, pages_contiguous


@triton.jit
def _normed(entries, scale, norm_ptr, inside, weight_offset, dtype: tl.constexpr):
    """Return entries of heads times `scale` and the weights at norm_ptr, rounded to dtype."""
    weight = tl.load(norm_ptr, mask=inside, other=0.0).to(tl.float32) + weight_offset
    return (entries * scale * weight).to(dtype).to(tl.float32)


@triton.jit
def _rotate_head_rows(
    from_ptr, to_ptr,                   # first entry of each head, [rows, 1]
    keep,                               # [rows, 1]: rows that exist
    scale,                              # of stored heads, see `narrowed`
    norm_ptr, epsilon, weight_offset,   # norm_ptr: weights of an RMS norm of each head; None: no norm
    cos_ptr, sin_ptr,                   # rows of the tables for this position
    HALF: tl.constexpr, HALF_POW2: tl.constexpr, REST: tl.constexpr, REST_POW2: tl.constexpr,
):
    """Write normed and rotated heads: rotate entry i of a head with entry HALF + i, for all i < HALF; copy the other
    entries.
    """
    dtype: tl.constexpr = from_ptr.dtype.element_ty       # rounded to it first, as a wide cache is
    to_dtype: tl.constexpr = to_ptr.dtype.element_ty
    square = tl.zeros([1, 1], tl.float32)
    if HALF > 0:
        lane = tl.arange(0, HALF_POW2)[None, :]
        inside = keep & (lane < HALF)
        first = tl.load(from_ptr + lane, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(from_ptr + HALF + lane, mask=inside, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            square += tl.sum(first * first + second * second, 1, keep_dims=True)
    if REST > 0:
        rest_lane = tl.arange(0, REST_POW2)[None, :]
        rest_inside = keep & (rest_lane < REST)
        rest = tl.load(from_ptr + 2 * HALF + rest_lane, mask=rest_inside, other=0.0).to(tl.float32)
        if norm_ptr is not None:
            square += tl.sum(rest * rest, 1, keep_dims=True)
    if norm_ptr is not None:
        norm = tl.rsqrt(square / (2 * HALF + REST) + epsilon)
    if HALF > 0:
        if norm_ptr is not None:
            first = _normed(first, norm, norm_ptr + lane, lane < HALF, weight_offset, dtype)
            second = _normed(second, norm, norm_ptr + HALF + lane, lane < HALF, weight_offset, dtype)
        cos = tl.load(cos_ptr + lane, mask=lane < HALF, other=0.0)
        sin = tl.load(sin_ptr + lane, mask=lane < HALF, other=0.0)
        tl.store(to_ptr + lane, narrowed((first * cos - second * sin).to(dtype), scale, to_dtype), mask=inside)
        tl.store(to_ptr + HALF + lane, narrowed((second * cos + first * sin).to(dtype), scale, to_dtype), mask=inside)
    if REST > 0:
        if norm_ptr is not None:
            rest = _normed(rest, norm, norm_ptr + 2 * HALF + rest_lane, rest_lane < REST, weight_offset, dtype)
        tl.store(to_ptr + 2 * HALF + rest_lane, narrowed(rest.to(dtype), scale, to_dtype), mask=rest_inside)


# Slices of the index tensors start anywhere: their alignment must not recompile the kernel.
@triton.jit(do_not_specialize_on_alignment=["slot_ptr", "position_ptr"])
def _rope_kv_append_kernel(
    query_ptr, key_ptr, value_ptr, query_out_ptr, kv_pool_ptr, slot_ptr, position_ptr, cos_ptr, sin_ptr,
    query_norm_ptr, key_norm_ptr, epsilon, weight_offset,                 # the first two are None without norms
    key_scale, value_scale,
    query_stride_t, key_stride_t, value_stride_t, query_out_stride_t,     # elements from one token to the next
    pool_stride_n, pool_stride_kv, pool_stride_h,                         # elements between blocks, K and V, heads
    GROUP: tl.constexpr, GROUP_POW2: tl.constexpr,                        # query heads of one kv head
    B: tl.constexpr, D: tl.constexpr, D_POW2: tl.constexpr,
    HALF: tl.constexpr, HALF_POW2: tl.constexpr,                          # R / 2; 0: no rotation
    REST: tl.constexpr, REST_POW2: tl.constexpr,                          # D - R
    WRITE_QUERY: tl.constexpr,                                            # off: unchanged and in place
):
    token = tl.program_id(0).to(tl.int64)      # so that all address arithmetic is 64-bit
    kv_head = tl.program_id(1)
    slot = tl.load(slot_ptr + token)
    if HALF > 0:
        position = tl.load(position_ptr + token).to(tl.int64)
        cos_ptr += position * HALF
        sin_ptr += position * HALF

    if WRITE_QUERY:
        member = tl.arange(0, GROUP_POW2)[:, None]
        head_start = (kv_head * GROUP + member) * D
        _rotate_head_rows(
            query_ptr + token * query_stride_t + head_start, query_out_ptr + token * query_out_stride_t + head_start,
            member < GROUP, 1.0, query_norm_ptr, epsilon, weight_offset, cos_ptr, sin_ptr, HALF, HALF_POW2, REST,
            REST_POW2,
        )

    if slot >= 0:
        row_ptr = kv_pool_ptr + (slot // B) * pool_stride_n + kv_head * pool_stride_h + (slot % B) * D
        one = tl.zeros([1, 1], tl.int32)
        _rotate_head_rows(
            key_ptr + token * key_stride_t + kv_head * D + one, row_ptr + one,
            one == 0, key_scale, key_norm_ptr, epsilon, weight_offset, cos_ptr, sin_ptr, HALF, HALF_POW2, REST,
            REST_POW2,
        )
        lane = tl.arange(0, D_POW2)
        value = tl.load(value_ptr + token * value_stride_t + kv_head * D + lane, mask=lane < D, other=0.0)
        tl.store(row_ptr + pool_stride_kv + lane, narrowed(value, value_scale, kv_pool_ptr.dtype.element_ty),
                 mask=lane < D)


def rope_kv_append(
    query, key, value, kv_pool, slot_mapping, positions=None, cos_table=None, sin_table=None, query_out=None,
    deterministic=False, query_norm=None, key_norm=None, epsilon=0.0, weight_offset=0.0,
    key_scale=1.0, value_scale=1.0,
):
    """Norm and rotate queries and keys, then append keys and values. Returns the changed queries.

    See the module docstring for shapes.
    """
    num_tokens, num_heads, head_size = query.shape
    num_kv_heads, tokens_per_block = kv_pool.shape[2:4]
    group = num_heads // num_kv_heads
    in_place = query_out is None
    query_out = query if in_place else query_out
    half = 0 if cos_table is None else cos_table.shape[1]
    rest = head_size - 2 * half
    assert all(heads_contiguous(rows) for rows in (query, key, value, query_out))
    assert pages_contiguous(kv_pool) and slot_mapping.is_contiguous()
    assert (query_norm is None) == (key_norm is None)
    assert half == 0 or (cos_table.is_contiguous() and sin_table.is_contiguous() and positions.is_contiguous())
    if num_tokens == 0:
        return query_out

    _rope_kv_append_kernel[(num_tokens, num_kv_heads)](
        query, key, value, query_out, entries_of(kv_pool, key.dtype, key_scale, value_scale), slot_mapping,
        slot_mapping if positions is None else positions, cos_table, sin_table,
        query_norm, key_norm, epsilon, weight_offset, key_scale, value_scale,
        query.stride(0), key.stride(0), value.stride(0), query_out.stride(0), *kv_pool.stride()[:3],
        GROUP=group, GROUP_POW2=triton.next_power_of_2(group),
        B=tokens_per_block, D=head_size, D_POW2=triton.next_power_of_2(head_size),
        HALF=half, HALF_POW2=triton.next_power_of_2(max(half, 1)),
        REST=rest, REST_POW2=triton.next_power_of_2(max(rest, 1)),
        WRITE_QUERY=half > 0 or not in_place or query_norm is not None,
        num_warps=1 if group * head_size <= 256 else 2,
    )
    return query_out
