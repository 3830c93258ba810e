"""Append the newest token of each sequence to its pages, and attend over them.

    key, value and query of sequence s are those of its token at position p = kv_lengths[s] - 1
    rotated(x) = [x1 * cos - x2 * sin, x2 * cos + x1 * sin, the other D - R entries unchanged], where x1 and x2 are the
    first and the second half of the leading R entries, and cos and sin are row p of the tables
    with norms, x is first replaced by its RMS norm: x / sqrt(mean(x^2) + epsilon) * (weight_offset + weight), where
    weight is query_norm or key_norm; rounded to the dtype of x
    page[0, h, p % B] = rotated(key[s, h]),  page[1, h, p % B] = value[s, h]   in block block_table[row of s, p // B]
    out[s, h] = softmax(scale * rotated(query[s, h]) . K[s, h // G]) V[s, h // G]
    over the keys k <= p of sequence s with k > p - window or k < sink

Shapes      query                    [S, HQ, D]   S sequences, HQ = G * HK query heads of size D; heads contiguous
            key, value               [S, HK, D]   likewise; the three may be views of one packed tensor
            kv_pool                  [N, 2, HK, B, D]   the pool of one layer: N blocks of B tokens; in the dtype of the
                                                        queries, or in e4m3 (torch.float8_e4m3fn)
            block_table              [rows, max_blocks] int32   pages of each sequence in order, including the newest
                                                        token's. Entries of pages without a visible key are not read:
                                                        their blocks may belong to another sequence.
            kv_lengths               [S] int32   keys of each sequence, including the newest token's; 0 = padded row
            work_list                [W, 4] int32   from `decode_work_list` for the same lengths, window and sink, on
                                                    the queries' device; -1 in its first column is padding
            part_starts              [S + 1] int32   likewise; None: no sequence is split
            slots                    [S] int32   row of block_table for each sequence; None: row s
            out                      [S, HQ, D]   None: allocated; must not share memory with query, key or value
            cos_table, sin_table     [positions, R / 2] float32   None: no rotation
            query_norm, key_norm     [D]   weights of the RMS norms of query and key heads; None: no norms
            counters                 [S, HK] int32, zeros   the last program of a split sequence combines its parts.
                                                    None: `paged_attention_merge` combines them
            alibi_slopes             [HQ] float32   None: no ALiBi bias
            sink_logits              [HQ] float32   None: no extra score
Units       window in tokens, None or 0 = no limit; scale > 0 is the factor on the scores.
            softcap: replace scores by softcap * tanh(scores / softcap), before the mask; None: no cap.
            alibi_slopes: add f(key position) - f(query position) to scores, after the cap and before the mask, with
            f(p) = slope * p. With alibi_bfloat16_factor > 0, f(p) = factor * bfloat16(slope * bfloat16(p)), as in
            Falcon; the slopes must then be representable in bfloat16.
            sink_logits: one extra score per head in the softmax, with a value of zeros. Unrelated to `sink`.
            sink: number of first tokens that stay visible outside the window (StreamingLLM, Xiao et al. 2023); ignored
            without a window. Positions are absolute: a key is rotated once, by its position, when it is written to the
            pool. It is not rotated again when tokens between it and the query leave the window.
            key_scale, value_scale: a pool in e4m3 stores keys and values divided by them and rounded, see fp8.py; the
            result is that of the rounded numbers times their scales. 1 for a pool in another dtype.
            The partition of the work list affects only the last bits of the result.
Mutates     kv_pool, at the newest position of each sequence, and out. A row of length 0 does not write to the pool;
            its output is zero. counters are zeros again after the launch.
Needs       Every page with a visible key has finite numbers at all positions before the newest token's position.
            The other positions of a page are not read. No two sequences append to the same position of a block.
Oracle      triton_kernels/reference/paged_attention_decode.py
Source      paged attention (Kwon et al. 2023), split over keys (Flash-Decoding, Dao et al. 2023), rotary embedding (Su
            et al. 2021) in the half-split arrangement; written for this project.

One program per work list row and kv head. The G query heads of the kv head are the rows of one matrix tile, padded to
16; one page is one tile of keys. The program of an unsplit sequence writes to `out`; `paged_attention_merge` combines
the parts of split sequences, or the programs do so themselves: each increases the counter of its sequence and kv head
when it has written its part, and the one that finds all others there combines them, in the order of the parts. The
barrier and the atomic operation, which releases and acquires at the scope of the GPU, make the parts of all programs
visible to it. The block id of the next page is loaded one iteration ahead; loading it in the same
iteration would take up the pipeline stages that keep pages in flight. Neither the number of parts nor the width of
block tables recompiles the kernel.

Each program norms and rotates its queries. The program of the last part also norms and rotates the newest key, writes
key and value to the pool, and starts its running softmax from this key and value in registers. Loads of pages mask the
newest token and all positions after it, so a launch never reads a position that it writes, and no ordering between
threads or programs is needed. A page whose first token is the newest is not loaded at all. The program of the last part
counts the sink logits, because each sequence has exactly one last part.

With sinks, one loop walks two ranges of pages: the pages of the sinks, then the pages of the window. The loop
numbers these pages without a gap: the number of the last sink page is one less than the number of the first window
page. A part can therefore have pages of both ranges, and the pipeline of page loads runs on from one range to the
next. `sink` is a compile-time constant, because an engine has one value; 0 adds no code.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .alibi import alibi, alibi_factors
from .device_limits import DeviceLimits, device_limits
from .fp8 import entries_of, narrowed, widened
from .paged_attention_merge import PARTS, combined, paged_attention_merge
from .soft_cap import LOG2_E, score_factors, soft_cap
from .strides import heads_contiguous, pages_contiguous


@triton.jit
def _rotated(row_ptr, keep, lane, norm_ptr, epsilon, weight_offset, cos, sin, D: tl.constexpr, HALF: tl.constexpr):
    """Return rows of heads, loaded as float32, with the leading 2 * HALF entries rotated.

    row_ptr    first entry of each row
    keep       mask of the entries to load; the result is 0 in other entries
    lane       indices of the entries
    norm_ptr   the weights of an RMS norm of each row; None: no norm
    cos, sin   cosine and sine for each entry; the sine is negated in the first HALF entries. Entries that do not rotate
               have cosine 1 and sine 0
    """
    head = tl.load(row_ptr + lane, mask=keep, other=0.0).to(tl.float32)
    if norm_ptr is not None:
        scale = tl.rsqrt(tl.sum(head * head, len(head.shape) - 1, keep_dims=True) / D + epsilon)
        weight = tl.load(norm_ptr + lane, mask=lane < D, other=0.0).to(tl.float32) + weight_offset
        head = (head * scale * weight).to(row_ptr.dtype.element_ty).to(tl.float32)
    if HALF > 0:
        partner = tl.where(lane < HALF, lane + HALF, lane - HALF)
        other = tl.load(row_ptr + partner, mask=keep & (lane < 2 * HALF), other=0.0).to(tl.float32)
        if norm_ptr is not None:
            weight = tl.load(norm_ptr + partner, mask=lane < 2 * HALF, other=0.0).to(tl.float32) + weight_offset
            other = (other * scale * weight).to(row_ptr.dtype.element_ty).to(tl.float32)
        head = head * cos + other * sin
    return head


# Slices of the index tensors start anywhere: their alignment must not recompile the kernel.
@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "kv_length_ptr", "slot_ptr", "work_ptr", "part_start_ptr"],
)
def _decode_kernel(
    query_ptr, key_ptr, value_ptr, kv_pool_ptr, cos_ptr, sin_ptr, block_table_ptr, kv_length_ptr, slot_ptr, work_ptr,
    out_ptr, partial_out_ptr, partial_lse_ptr,            # out: unsplit sequences; the other two: split ones
    slope_ptr, sink_logit_ptr,                            # None: see HAS_ALIBI and HAS_SINK_LOGITS
    query_norm_ptr, key_norm_ptr, epsilon, weight_offset,           # the first two are None without norms
    part_start_ptr, counter_ptr,                          # counter_ptr: None if another launch merges the parts
    key_scale, value_scale,                               # of codes of e4m3; see `narrowed`
    score_factor, window,                                 # see `score_factors`; the factor includes key_scale
    query_stride_s, key_stride_s, value_stride_s,         # elements from one sequence to the next
    out_stride_s, table_stride,                           # likewise, and from one table row to the next
    pool_stride_n, pool_stride_kv, pool_stride_h,         # elements between blocks, K and V, heads
    HQ: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,      # ROWS: GROUP padded for the matrix unit
    B: tl.constexpr, D: tl.constexpr, D_POW2: tl.constexpr,
    HALF: tl.constexpr,                                   # R / 2; 0: no rotation
    STAGES: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_WINDOW: tl.constexpr, SINK: tl.constexpr, CAP_LOG2: tl.constexpr,
    HAS_ALIBI: tl.constexpr, SLOPE_FACTOR: tl.constexpr, ALIBI_FACTOR: tl.constexpr,      # see `alibi_factors`
    HAS_SINK_LOGITS: tl.constexpr, LOG2_E: tl.constexpr,
    WIDENS_FP8: tl.constexpr,                             # see `widened`
    GROUP_POW2: tl.constexpr, PARTS: tl.constexpr,        # see `combined`
):
    IS_SCALED: tl.constexpr = CAP_LOG2 > 0 or HAS_ALIBI   # scores are scaled before the softmax
    kv_head = tl.program_id(0)                            # heads vary fastest, so that the longest parts start first
    work_ptr += 4 * tl.program_id(1)
    sequence = tl.load(work_ptr).to(tl.int64)
    if sequence < 0:
        return
    num_pages = tl.load(work_ptr + 2)
    partial = tl.load(work_ptr + 3)                       # -1: the only part of its sequence
    kv_length = tl.load(kv_length_ptr + sequence)

    member = tl.arange(0, ROWS)
    lane = tl.arange(0, D_POW2)
    head = kv_head * GROUP + member
    row_inside = (member < GROUP)[:, None] & (lane < D)[None, :]
    out_ptr += sequence * out_stride_s
    if num_pages == 0:                                    # a padded row
        zeros = tl.zeros([ROWS, D_POW2], out_ptr.dtype.element_ty)
        tl.store(out_ptr + head[:, None] * D + lane[None, :], zeros, mask=row_inside)
        return

    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(kv_length - window, 0)
    first_page = first_key // B
    skipped = 0                                           # pages between the sinks and the window
    if SINK > 0:
        window_page = first_page
        skipped = tl.maximum(window_page - (SINK + B - 1) // B, 0)
        first_page = skipped
    begin = first_page + tl.load(work_ptr + 1)
    end = begin + num_pages
    newest = kv_length - 1                                # a position; its page is the last of the last part
    holds_newest = end * B > newest
    end = tl.minimum(end, tl.cdiv(newest, B))             # pages with an older key

    table_row = sequence
    if HAS_SLOTS:
        table_row = tl.load(slot_ptr + sequence).to(tl.int64)
    table_ptr = block_table_ptr + table_row * table_stride
    if SINK > 0:
        block = tl.load(table_ptr + tl.where(begin < window_page, begin - skipped, begin))
    else:
        block = tl.load(table_ptr + begin)

    cos = tl.full([D_POW2], 1.0, tl.float32)
    sin = tl.zeros([D_POW2], tl.float32)
    if HALF > 0:
        angle = newest.to(tl.int64) * HALF + tl.where(lane < HALF, lane, lane - HALF)
        cos = tl.load(cos_ptr + angle, mask=lane < 2 * HALF, other=1.0)
        sin = tl.load(sin_ptr + angle, mask=lane < 2 * HALF, other=0.0)
        sin = tl.where(lane < HALF, -sin, sin)
    query = _rotated(
        query_ptr + sequence * query_stride_s + head[:, None] * D, row_inside, lane[None, :], query_norm_ptr, epsilon,
        weight_offset, cos[None, :], sin[None, :], D, HALF,
    ).to(query_ptr.dtype.element_ty)

    # In the part with the newest token, the running softmax starts from that token.
    writes = lane < tl.where(holds_newest, D, 0)
    new_key = _rotated(
        key_ptr + sequence * key_stride_s + kv_head * D, writes, lane, key_norm_ptr, epsilon, weight_offset, cos, sin,
        D, HALF,
    )
    new_key = narrowed(new_key.to(query.dtype), key_scale, kv_pool_ptr.dtype.element_ty)
    new_value = tl.load(value_ptr + sequence * value_stride_s + kv_head * D + lane, mask=writes, other=0.0)
    new_value = narrowed(new_value, value_scale, kv_pool_ptr.dtype.element_ty)
    new_block = tl.load(table_ptr + newest // B).to(tl.int64)
    new_ptr = kv_pool_ptr + new_block * pool_stride_n + kv_head * pool_stride_h + (newest % B) * D + lane
    tl.store(new_ptr, new_key, mask=writes)
    tl.store(new_ptr + pool_stride_kv, new_value, mask=writes)
    new_key = widened(new_key, query.dtype, WIDENS_FP8)
    new_value = widened(new_value, query.dtype, WIDENS_FP8)
    score = tl.sum(query.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * score_factor
    if CAP_LOG2 > 0:
        score = soft_cap(score, CAP_LOG2)
    top = tl.where(holds_newest, score, -float("inf"))
    total = tl.zeros([ROWS], tl.float32) + tl.where(holds_newest, 1.0, 0.0)
    weighted = tl.zeros([ROWS, D_POW2], tl.float32) + new_value.to(tl.float32)[None, :]
    if HAS_SINK_LOGITS:                                   # once per sequence: in the part with the newest token
        sink_logit = tl.load(sink_logit_ptr + head, mask=member < GROUP, other=0.0) * LOG2_E
        with_sink = tl.where(holds_newest, tl.maximum(top, sink_logit), 0.0)
        shrink = tl.exp2(top - with_sink)
        total = total * shrink + tl.where(holds_newest, tl.exp2(sink_logit - with_sink), 0.0)
        weighted = weighted * shrink[:, None]
        top = tl.where(holds_newest, with_sink, top)
    if HAS_ALIBI:                                         # the bias of the newest token's own score is 0
        slope = tl.load(slope_ptr + head, mask=member < GROUP, other=0.0) * SLOPE_FACTOR

    token = tl.arange(0, B)
    keys_ptr = kv_pool_ptr + kv_head * pool_stride_h
    key_offset = token[None, :] * D + lane[:, None]                       # keys arrive transposed
    value_offset = pool_stride_kv + token[:, None] * D + lane[None, :]

    for page in tl.range(begin, end, num_stages=STAGES):
        if SINK > 0:
            next_page = tl.where(page + 1 < window_page, page + 1 - skipped, page + 1)
            next_block = tl.load(table_ptr + next_page, mask=page + 1 < end, other=0)
        else:
            next_block = tl.load(table_ptr + page + 1, mask=page + 1 < end, other=0)
        page_ptr = keys_ptr + block.to(tl.int64) * pool_stride_n
        if SINK > 0:
            page_begin = tl.where(page < window_page, page - skipped, page) * B
        else:
            page_begin = page * B
        position = page_begin + token
        is_older = position < newest
        if D == D_POW2:
            keys = tl.load(page_ptr + key_offset, mask=is_older[None, :], other=0.0)
        else:
            keys = tl.load(page_ptr + key_offset, mask=is_older[None, :] & (lane < D)[:, None], other=0.0)
        scores = tl.dot(query, widened(keys, query.dtype, WIDENS_FP8), input_precision="ieee")
        if CAP_LOG2 > 0:
            scores = soft_cap(scores * score_factor, CAP_LOG2)
        if HAS_ALIBI:
            if CAP_LOG2 == 0:
                scores = scores * score_factor
            scores += alibi(position[None, :], newest, slope[:, None], ALIBI_FACTOR)
        visible = is_older
        if SINK > 0:
            visible = visible & ((position >= first_key) | (position < SINK))
        elif HAS_WINDOW:
            visible = visible & (position >= first_key)
        scores = tl.where(visible[None, :], scores, -float("inf"))

        if IS_SCALED:
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
        else:                                             # the scale is part of the exponent's fused multiply-add
            new_top = tl.maximum(top, tl.max(scores, 1) * score_factor)
            weights = tl.exp2(scores * score_factor - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        if D == D_POW2:
            values = tl.load(page_ptr + value_offset, mask=is_older[:, None], other=0.0)
        else:
            values = tl.load(page_ptr + value_offset, mask=is_older[:, None] & (lane < D)[None, :], other=0.0)
        weighted = weighted * shrink[:, None]
        values = widened(values, query.dtype, WIDENS_FP8)
        weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
        top = new_top
        block = next_block

    result = weighted / total[:, None]
    if kv_pool_ptr.dtype.element_ty == tl.uint8:
        result = result * value_scale
    if partial < 0:
        out_rows_ptr = out_ptr + head[:, None] * D + lane[None, :]
        tl.store(out_rows_ptr, result.to(out_ptr.dtype.element_ty), mask=row_inside)
    else:
        partial_row = partial.to(tl.int64) * HQ + head
        tl.store(partial_out_ptr + partial_row[:, None] * D + lane[None, :], result, mask=row_inside)
        tl.store(partial_lse_ptr + partial_row, top + tl.log2(total), mask=member < GROUP)
        if counter_ptr is not None:
            first_part = tl.load(part_start_ptr + sequence)
            end_part = tl.load(part_start_ptr + sequence + 1)
            counter_ptr += sequence * (HQ // GROUP) + kv_head
            tl.debug_barrier()                            # one thread counts, after the stores of all
            num_before = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu")
            if num_before == end_part - first_part - 1:
                tl.debug_barrier()
                tl.store(counter_ptr, 0)
                merged = combined(
                    partial_out_ptr, partial_lse_ptr, first_part, end_part, kv_head * GROUP, HQ, GROUP, GROUP_POW2, D,
                    D_POW2, PARTS,
                )
                merged_head = kv_head * GROUP + tl.arange(0, GROUP_POW2)[:, None]
                tl.store(
                    out_ptr + merged_head * D + lane[None, :], merged.to(out_ptr.dtype.element_ty),
                    mask=(tl.arange(0, GROUP_POW2) < GROUP)[:, None] & (lane < D)[None, :],
                )


COMBINED_ENTRIES = 4096     # of partial results that a program combines at once: they fit into its registers
REDUCTION_BYTES = 256       # upper bound of the shared memory in which the warps of a program exchange row sums


class DecodeSettings(NamedTuple):
    """Launch settings.

    resident_programs       programs that the device runs at the same time
    num_warps, num_stages   warps and pipeline stages of one program
    """

    resident_programs: int
    num_warps: int
    num_stages: int


def decode_settings(head_size: int, tokens_per_block: int, element_size_bytes: int,
                    limits: DeviceLimits) -> DecodeSettings:
    """Return the launch settings. They depend only on shapes, so all steps of an engine use the same settings.

    element_size_bytes   of the queries: pages in e4m3 take less shared memory, but more registers for widening

    Each pipeline stage beyond the first holds a page of keys and a page of values in shared memory. A program has
    the largest number of stages, at most 4, with which two programs fit on a multiprocessor. One program then loads
    while the other computes. If two programs do not fit even with 2 stages, one program is enough: it has 2 stages
    if it fits with them, otherwise 1. If pages are small, more than two programs fit on a multiprocessor. The limit
    is four programs of four warps each, because the registers allow no more.
    """
    page_bytes = bytes_of_page(head_size, tokens_per_block, element_size_bytes)
    num_stages = 4
    while num_stages > 2 and bytes_of_program(num_stages, page_bytes) > limits.shared_bytes // 2:
        num_stages -= 1
    if bytes_of_program(num_stages, page_bytes) > limits.shared_bytes:
        num_stages = 1
    return with_resident_programs(num_stages, 4 if page_bytes < 32 * 1024 else 8, page_bytes, limits)


def bytes_of_page(head_size: int, tokens_per_block: int, element_size_bytes: int) -> int:
    """Return the bytes of shared memory for the keys of a page, of one KV head. The values take as many."""
    return tokens_per_block * _padded(head_size) * element_size_bytes


def bytes_of_program(num_stages: int, page_bytes: int) -> int:
    """Return an estimate of the shared memory of a program, for the choice of settings."""
    return max(num_stages - 1, 1) * 2 * page_bytes + 10 * 1024


def with_resident_programs(num_stages: int, num_warps: int, page_bytes: int, limits: DeviceLimits) -> DecodeSettings:
    """Return the settings with these stages and warps, and with the number of resident programs that they allow."""
    resident = max(1, min(limits.shared_bytes // bytes_of_program(num_stages, page_bytes), 16 // num_warps))
    return DecodeSettings(resident * limits.multiprocessors, num_warps, num_stages)


def decode_shared_bytes(head_size: int, group: int, tokens_per_block: int, element_size_bytes: int,
                        limits: DeviceLimits) -> int:
    """Return the bytes of shared memory of one program, with the settings of `decode_settings`.

    On NVIDIA GPUs, a program takes this number of bytes, or up to 512 fewer. On AMD GPUs, the number counts only
    the memory of the pages.

    group   query heads per kv head
    """
    stages = decode_settings(head_size, tokens_per_block, element_size_bytes, limits).num_stages
    entries = max(1, 2 * (stages - 1)) * tokens_per_block * _padded(head_size)        # keys and values
    if limits.rows_pass_shared:
        entries += _padded(group) * (_padded(head_size) + tokens_per_block)           # queries and weights
    return entries * element_size_bytes + (REDUCTION_BYTES if limits.rows_pass_shared else 0)


def _padded(size: int) -> int:
    """Return `size` rounded up to a power of two, at least 16: the size of a dimension of a tile."""
    return max(16, triton.next_power_of_2(size))


def paged_attention_decode(
    query, key, value, kv_pool, block_table, kv_lengths, work_list, part_starts, scale, window=None, slots=None,
    out=None, sink=0, softcap=None, cos_table=None, sin_table=None, alibi_slopes=None, alibi_bfloat16_factor=None,
    sink_logits=None, query_norm=None, key_norm=None, epsilon=0.0, weight_offset=0.0, counters=None,
    key_scale=1.0, value_scale=1.0,
):
    """Append the newest token of each sequence to its pages, and attend over them. Returns out.

    See the module docstring for shapes.
    """
    num_sequences, num_heads, head_size = query.shape
    num_kv_heads, tokens_per_block = kv_pool.shape[2:4]
    group = num_heads // num_kv_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    assert num_heads == group * num_kv_heads
    half = 0 if cos_table is None else cos_table.shape[1]
    assert all(heads_contiguous(rows) for rows in (query, key, value, out)) and pages_contiguous(kv_pool)
    assert half == 0 or (cos_table.is_contiguous() and sin_table.is_contiguous())
    assert (query_norm is None) == (key_norm is None)
    assert block_table.stride(1) == 1 and kv_lengths.is_contiguous() and work_list.is_contiguous()
    if num_sequences == 0:
        return out
    assert counters is None or counters.is_contiguous() and counters.numel() >= num_sequences * num_kv_heads
    assert alibi_slopes is None or alibi_slopes.shape == (num_heads,) and alibi_slopes.is_contiguous()
    assert sink_logits is None or sink_logits.shape == (num_heads,) and sink_logits.is_contiguous()
    score_factor, cap_log2 = score_factors(scale * key_scale, softcap)
    slope_factor, alibi_factor = alibi_factors(alibi_bfloat16_factor)

    # There are at most as many partial results as programs. With None for them when no sequence is split, the kernel
    # would be compiled in two variants.
    num_partials = 0 if part_starts is None else len(work_list)
    partial_out = torch.empty((num_partials, num_heads, head_size), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((num_partials, num_heads), dtype=torch.float32, device=query.device)
    limits = device_limits()
    settings = decode_settings(head_size, tokens_per_block, query.element_size(), limits)
    group_pow2 = triton.next_power_of_2(group)
    _decode_kernel[(num_kv_heads, len(work_list))](
        query, key, value, entries_of(kv_pool, query.dtype, key_scale, value_scale), cos_table, sin_table, block_table,
        kv_lengths, slots, work_list,
        out, partial_out, partial_lse, alibi_slopes, sink_logits, query_norm, key_norm, epsilon, weight_offset,
        work_list if part_starts is None else part_starts, counters,
        key_scale, value_scale, score_factor, window or 0,
        query.stride(0), key.stride(0), value.stride(0), out.stride(0), block_table.stride(0), *kv_pool.stride()[:3],
        HQ=num_heads, GROUP=group, ROWS=_padded(group),
        B=tokens_per_block, D=head_size, D_POW2=_padded(head_size),
        HALF=half, STAGES=settings.num_stages,
        HAS_SLOTS=slots is not None, HAS_WINDOW=bool(window), SINK=sink if window else 0,
        CAP_LOG2=cap_log2,
        HAS_ALIBI=alibi_slopes is not None, SLOPE_FACTOR=slope_factor, ALIBI_FACTOR=alibi_factor,
        HAS_SINK_LOGITS=sink_logits is not None, LOG2_E=LOG2_E,
        WIDENS_FP8=limits.widens_fp8, GROUP_POW2=group_pow2,
        PARTS=min(max(COMBINED_ENTRIES // (group_pow2 * _padded(head_size)), 1), PARTS),
        num_warps=settings.num_warps, num_stages=settings.num_stages,
    )
    if part_starts is None or counters is not None:
        return out
    return paged_attention_merge(partial_out, partial_lse, part_starts, out)
