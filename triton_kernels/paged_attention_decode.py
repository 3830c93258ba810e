"""Attention of one query token per sequence over that sequence's pages.

    out[s, h] = softmax(scale * query[s, h] . K[s, h // G]) V[s, h // G]
    over the keys k of sequence s with k > p - window or k < sink, where its query stands at p = kv_lengths[s] - 1

Shapes      query                    [S, HQ, D]   S sequences, HQ = G * HK query heads; heads contiguous
            kv_pool                  [N, 2, HK, B, D]   one layer's view of the pool: N blocks of B tokens
            block_table              [rows, max_blocks] int32   pages of a sequence, in order. An entry whose page
                                                        holds no visible key is not looked at: its block may have
                                                        been given to somebody else.
            kv_lengths               [S] int32   keys of each sequence, its newest token's included; 0 = padding row
            work_list                [W, 4] int32   from `decode_work_list` for the same lengths, window and sink, on
                                                    the queries' device; -1 in its first column is padding
            part_starts              [S + 1] int32   likewise; None: no sequence has several parts
            slots                    [S] int32   the sequence's row of block_table; None: row s is sequence s
            out                      [S, HQ, D]   None: allocated; may be `query` itself
Units       window in tokens, None or 0 = no limit; scale > 0 is the factor on the scores.
            softcap: scores become softcap * tanh(scores / softcap), before the mask; None: they stay as they are.
            sink: first tokens that stay visible outside the window (StreamingLLM, Xiao et al. 2023); of no meaning
            without one. Positions are absolute: keys lie in the pool rotated by the position they were written at
            and are not rotated again when tokens between them and the query have left the window.
            The result depends on where the work list cuts a sequence in the last bits only.
Mutates     out. A row of length 0 is set to zero.
Needs       a page with a visible key holds finite numbers in all its B tokens: the pool is zeroed once.
Oracle      triton_kernels/reference/paged_attention_decode.py
Source      paged attention (Kwon et al. 2023), split over keys (Flash-Decoding, Dao et al. 2023); written for this
            project.

One program is one row of the work list and one kv head: the G query heads of the kv head are the rows of one matrix
tile, padded to 16, and one page is one tile of keys. A sequence in one part is written to `out` by its program;
`paged_attention_merge` puts the parts of others together. Pages are loaded whole, without a mask; only scores are
masked. The block id of the next page is loaded one iteration ahead: loaded in the same iteration, it would eat the
pipeline stages that keep pages in flight. How many parts there are, and how long block tables are, makes no variant of
the kernel.

With sinks the pages are walked in two ranges, the sinks' and the window's, as one loop: the sinks' pages take the
numbers right below the window's first page, so that parts and stages run across the gap. `sink` is a compile-time
constant, because an engine has one: 0 leaves no trace in the code.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .device_limits import DeviceLimits, device_limits
from .paged_attention_merge import paged_attention_merge
from .soft_cap import score_factors, soft_cap
from .strides import heads_contiguous, pages_contiguous


# Slices of the index tensors start anywhere: their alignment must not make a variant of the kernel.
@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "kv_length_ptr", "slot_ptr", "work_ptr"],
)
def _decode_kernel(
    query_ptr, kv_pool_ptr, block_table_ptr, kv_length_ptr, slot_ptr, work_ptr,
    out_ptr, partial_out_ptr, partial_lse_ptr,            # out of a sequence in one part, the other two of others
    score_factor, window,                                 # see `score_factors`
    query_stride_s, out_stride_s, table_stride,           # elements from one sequence, or table row, to the next
    pool_stride_n, pool_stride_kv, pool_stride_h,         # elements between blocks, K and V, heads
    HQ: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,      # ROWS: GROUP padded for the matrix unit
    B: tl.constexpr, D: tl.constexpr, D_POW2: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_WINDOW: tl.constexpr, SINK: tl.constexpr, CAP_LOG2: tl.constexpr,
):
    kv_head = tl.program_id(0)                            # heads side by side, so that the longest parts start first
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
    out_offset = sequence * out_stride_s + head[:, None] * D + lane[None, :]
    if num_pages == 0:                                    # a padding row
        tl.store(out_ptr + out_offset, tl.zeros([ROWS, D_POW2], out_ptr.dtype.element_ty), mask=row_inside)
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

    table_row = sequence
    if HAS_SLOTS:
        table_row = tl.load(slot_ptr + sequence).to(tl.int64)
    table_ptr = block_table_ptr + table_row * table_stride
    if SINK > 0:
        block = tl.load(table_ptr + tl.where(begin < window_page, begin - skipped, begin))
    else:
        block = tl.load(table_ptr + begin)

    query = tl.load(
        query_ptr + sequence * query_stride_s + head[:, None] * D + lane[None, :], mask=row_inside, other=0.0
    )
    token = tl.arange(0, B)
    keys_ptr = kv_pool_ptr + kv_head * pool_stride_h
    key_offset = token[None, :] * D + lane[:, None]                       # keys arrive transposed
    value_offset = pool_stride_kv + token[:, None] * D + lane[None, :]

    top = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    weighted = tl.zeros([ROWS, D_POW2], tl.float32)
    for page in tl.range(begin, end, num_stages=STAGES):
        if SINK > 0:
            next_page = tl.where(page + 1 < window_page, page + 1 - skipped, page + 1)
            next_block = tl.load(table_ptr + next_page, mask=page + 1 < end, other=0)
        else:
            next_block = tl.load(table_ptr + page + 1, mask=page + 1 < end, other=0)
        page_ptr = keys_ptr + block.to(tl.int64) * pool_stride_n
        if D == D_POW2:
            keys = tl.load(page_ptr + key_offset)
        else:
            keys = tl.load(page_ptr + key_offset, mask=(lane < D)[:, None], other=0.0)
        scores = tl.dot(query, keys, input_precision="ieee")
        if CAP_LOG2 > 0:
            scores = soft_cap(scores * score_factor, CAP_LOG2)
        position = page * B + token
        if SINK > 0:
            position = tl.where(page < window_page, page - skipped, page) * B + token
        visible = position < kv_length
        if SINK > 0:
            visible = visible & ((position >= first_key) | (position < SINK))
        elif HAS_WINDOW:
            visible = visible & (position >= first_key)
        scores = tl.where(visible[None, :], scores, -float("inf"))

        if CAP_LOG2 > 0:
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
        else:                                             # scaled in the sum of the exponent, at no cost
            new_top = tl.maximum(top, tl.max(scores, 1) * score_factor)
            weights = tl.exp2(scores * score_factor - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weights, 1)
        if D == D_POW2:
            values = tl.load(page_ptr + value_offset)
        else:
            values = tl.load(page_ptr + value_offset, mask=(lane < D)[None, :], other=0.0)
        weighted = weighted * shrink[:, None]
        weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
        top = new_top
        block = next_block

    result = weighted / total[:, None]
    if partial < 0:
        tl.store(out_ptr + out_offset, result.to(out_ptr.dtype.element_ty), mask=row_inside)
    else:
        partial_row = partial.to(tl.int64) * HQ + head
        tl.store(partial_out_ptr + partial_row[:, None] * D + lane[None, :], result, mask=row_inside)
        tl.store(partial_lse_ptr + partial_row, top + tl.log2(total), mask=member < GROUP)


class DecodeSettings(NamedTuple):
    """places: programs that the device runs at the same time; num_warps, num_stages: of one program."""

    places: int
    num_warps: int
    num_stages: int


def decode_settings(head_size: int, tokens_per_block: int, element_size_bytes: int,
                    limits: DeviceLimits) -> DecodeSettings:
    """How to launch, from shapes alone: the same for every step of an engine.

    A stage holds a page of keys and one of values beyond the pair in use. There are as many stages as let two programs
    share a multiprocessor, so that one loads while the other computes. Small pages leave room for more programs, up to
    the four of four warps that the registers hold.
    """
    page_bytes = tokens_per_block * max(16, triton.next_power_of_2(head_size)) * element_size_bytes
    fixed_bytes = 10 * 1024

    def shared_bytes(num_stages: int) -> int:
        return max(num_stages - 1, 1) * 2 * page_bytes + fixed_bytes

    num_stages = 4
    while num_stages > 2 and shared_bytes(num_stages) > limits.shared_bytes // 2:
        num_stages -= 1
    if shared_bytes(num_stages) > limits.shared_bytes:
        num_stages = 1
    num_warps = 4 if page_bytes < 32 * 1024 else 8
    resident = max(1, min(limits.shared_bytes // shared_bytes(num_stages), 16 // num_warps))
    return DecodeSettings(places=resident * limits.multiprocessors, num_warps=num_warps, num_stages=num_stages)


def paged_attention_decode(
    query, kv_pool, block_table, kv_lengths, work_list, part_starts, scale, window=None, slots=None, out=None, sink=0,
    softcap=None,
):
    """One query token per sequence; see the module's docstring for shapes. Returns out."""
    num_sequences, num_heads, head_size = query.shape
    num_kv_heads, tokens_per_block = kv_pool.shape[2:4]
    group = num_heads // num_kv_heads
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    assert query.dtype == kv_pool.dtype and num_heads == group * num_kv_heads
    assert heads_contiguous(query) and heads_contiguous(out) and pages_contiguous(kv_pool)
    assert block_table.stride(1) == 1 and kv_lengths.is_contiguous() and work_list.is_contiguous()
    if num_sequences == 0:
        return out
    score_factor, cap_log2 = score_factors(scale, softcap)

    # No more partial results than programs. None, where there are none, would be another variant of the kernel.
    num_partials = 0 if part_starts is None else len(work_list)
    partial_out = torch.empty((num_partials, num_heads, head_size), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((num_partials, num_heads), dtype=torch.float32, device=query.device)
    settings = decode_settings(head_size, tokens_per_block, query.element_size(), device_limits())
    _decode_kernel[(num_kv_heads, len(work_list))](
        query, kv_pool, block_table, kv_lengths, slots, work_list, out, partial_out, partial_lse,
        score_factor, window or 0,
        query.stride(0), out.stride(0), block_table.stride(0), *kv_pool.stride()[:3],
        HQ=num_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
        B=tokens_per_block, D=head_size, D_POW2=max(16, triton.next_power_of_2(head_size)),
        STAGES=settings.num_stages,
        HAS_SLOTS=slots is not None, HAS_WINDOW=bool(window), SINK=sink if window else 0,
        CAP_LOG2=cap_log2,
        num_warps=settings.num_warps, num_stages=settings.num_stages,
    )
    return out if part_starts is None else paged_attention_merge(partial_out, partial_lse, part_starts, out)
