"""Attention of one query token per sequence over that sequence's pages.

    out[s, h] = softmax(scale * query[s, h] . K[s, h // G]) V[s, h // G]
    over the keys k of sequence s with k > p - window or k < sink, where its query stands at p = kv_lengths[s] - 1

Shapes      query                    [S, HQ, D]   S sequences, HQ = G * HK query heads; heads contiguous
            kv_pool                  [N, 2, HK, B, D]   one layer's view of the pool: N blocks of B tokens
            block_table              [rows, max_blocks] int32   pages of a sequence, in order. An entry whose page
                                                        holds no visible key is not looked at: its block may have
                                                        been given to somebody else.
            kv_lengths               [S] int32   keys of each sequence, its newest token's included; 0 = padding row
            slots                    [S] int32   the sequence's row of block_table; None: row s is sequence s
            out                      [S, HQ, D]   None: allocated; may be `query` itself
Units       window in tokens, None or 0 = no limit; scale > 0 is the factor on the scores.
            softcap: scores become softcap * tanh(scores / softcap), before the mask; None: they stay as they are.
            sink: first tokens that stay visible outside the window (StreamingLLM, Xiao et al. 2023); of no meaning
            without one. Positions are absolute: keys lie in the pool rotated by the position they were written at
            and are not rotated again when tokens between them and the query have left the window.
            splits: parts a sequence's pages are cut into, None = chosen from the shapes. The result depends on it in
            the last bits only; pass a constant to get the same bits in every batch.
Mutates     out. A row of length 0 is set to zero.
Needs       a page with a visible key holds finite numbers in all its B tokens: the pool is zeroed once.
Oracle      triton_kernels/reference/paged_attention_decode.py
Source      paged attention (Kwon et al. 2023), split over keys (Flash-Decoding, Dao et al. 2023); written for this
            project.

One program is one (sequence, kv head, part): the G query heads of the kv head are the rows of one matrix tile, padded
to 16, and one page is one tile of keys. Pages are loaded whole, without a mask; only scores are masked. The block id
of the next page is loaded one iteration ahead: loaded in the same iteration, it would eat the pipeline stages that
keep pages in flight. Lengths are read on the device only, so a captured graph replays with any lengths.

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

MIN_PAGES_PER_SPLIT = 2
MAX_SPLITS = 32


# Slices of the index tensors start anywhere: their alignment must not make a variant of the kernel.
@triton.jit(
    do_not_specialize=["window"],
    do_not_specialize_on_alignment=["block_table_ptr", "kv_length_ptr", "slot_ptr"],
)
def _decode_kernel(
    query_ptr, kv_pool_ptr, block_table_ptr, kv_length_ptr, slot_ptr,
    out_ptr, partial_out_ptr, partial_lse_ptr,            # out with one part, the other two with several
    score_factor, window,                                 # see `score_factors`
    query_stride_s, out_stride_s, table_stride,           # elements from one sequence, or table row, to the next
    pool_stride_n, pool_stride_kv, pool_stride_h,         # elements between blocks, K and V, heads
    HQ: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,      # ROWS: GROUP padded for the matrix unit
    B: tl.constexpr, D: tl.constexpr, D_POW2: tl.constexpr,
    SPLITS: tl.constexpr, MIN_PAGES: tl.constexpr, STAGES: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_WINDOW: tl.constexpr, SINK: tl.constexpr, CAP_LOG2: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    kv_length = tl.load(kv_length_ptr + sequence)

    member = tl.arange(0, ROWS)
    lane = tl.arange(0, D_POW2)
    head = kv_head * GROUP + member
    row_inside = (member < GROUP)[:, None] & (lane < D)[None, :]
    out_offset = sequence * out_stride_s + head[:, None] * D + lane[None, :]
    part = (sequence * HQ + head) * SPLITS + split

    first_key = 0
    if HAS_WINDOW:
        first_key = tl.maximum(kv_length - window, 0)
    first_page = first_key // B
    skipped = 0                                           # pages between the sinks and the window
    if SINK > 0:
        window_page = first_page
        skipped = tl.maximum(window_page - (SINK + B - 1) // B, 0)
        first_page = skipped
    num_pages = tl.cdiv(kv_length, B)
    pages_per_split = tl.maximum(tl.cdiv(num_pages - first_page, SPLITS), MIN_PAGES)
    begin = first_page + split * pages_per_split
    end = tl.minimum(begin + pages_per_split, num_pages)
    if begin >= end:                                      # a padding row, or more parts than pages
        if SPLITS == 1:
            tl.store(out_ptr + out_offset, tl.zeros([ROWS, D_POW2], out_ptr.dtype.element_ty), mask=row_inside)
        else:
            tl.store(partial_lse_ptr + part, tl.full([ROWS], -float("inf"), tl.float32), mask=member < GROUP)
        return

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
    if SPLITS == 1:
        tl.store(out_ptr + out_offset, result.to(out_ptr.dtype.element_ty), mask=row_inside)
    else:
        tl.store(partial_out_ptr + part[:, None] * D + lane[None, :], result, mask=row_inside)
        tl.store(partial_lse_ptr + part, top + tl.log2(total), mask=member < GROUP)


class DecodeSettings(NamedTuple):
    """splits: parts per sequence; num_warps, num_stages: of one program."""

    splits: int
    num_warps: int
    num_stages: int


def decode_settings(
    num_sequences: int, num_kv_heads: int, max_pages: int, page_bytes: int, limits: DeviceLimits
) -> DecodeSettings:
    """How to launch, from shapes alone: the same for every step of a shape, so that graphs can be captured.

    max_pages is how many one sequence may read, page_bytes one kv head's keys of one block. A stage holds a page of
    keys and one of values beyond the pair in use. Two programs share a multiprocessor, so that one loads while the
    other computes. The smallest power of two of parts is taken that fills the device's places to 85% on average, with
    two pages a part at least.
    """
    fixed_bytes = 10 * 1024
    num_stages = 4
    while num_stages > 2 and (num_stages - 1) * 2 * page_bytes + fixed_bytes > limits.shared_bytes // 2:
        num_stages -= 1
    if 2 * page_bytes + fixed_bytes > limits.shared_bytes:
        num_stages = 1

    places = 2 * limits.multiprocessors
    programs = max(1, num_sequences * num_kv_heads)
    most = max(1, min(MAX_SPLITS, max_pages // MIN_PAGES_PER_SPLIT))
    choices = [splits for splits in (1, 2, 4, 8, 16, 32) if splits <= most]
    fill = {splits: programs * splits / (-(-programs * splits // places) * places) for splits in choices}
    splits = next((splits for splits in choices if fill[splits] >= 0.85), choices[-1])
    return DecodeSettings(splits=splits, num_warps=4 if page_bytes < 32 * 1024 else 8, num_stages=num_stages)


def paged_attention_decode(
    query, kv_pool, block_table, kv_lengths, scale, window=None, slots=None, out=None, splits=None, sink=0,
    softcap=None,
):
    """One query token per sequence; see the module's docstring for shapes. Returns out."""
    num_sequences, num_heads, head_size = query.shape
    num_kv_heads, tokens_per_block = kv_pool.shape[2:4]
    group = num_heads // num_kv_heads
    head_pow2 = max(16, triton.next_power_of_2(head_size))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    assert query.dtype == kv_pool.dtype and num_heads == group * num_kv_heads
    assert heads_contiguous(query) and heads_contiguous(out) and pages_contiguous(kv_pool)
    assert block_table.stride(1) == 1 and kv_lengths.is_contiguous()
    if num_sequences == 0:
        return out
    score_factor, cap_log2 = score_factors(scale, softcap)

    page_bytes = tokens_per_block * head_pow2 * query.element_size()
    max_pages = block_table.shape[1]
    if window:
        max_pages = min(max_pages, triton.cdiv(window - 1, tokens_per_block) + 1 + triton.cdiv(sink, tokens_per_block))
    settings = decode_settings(num_sequences, num_kv_heads, max_pages, page_bytes, device_limits())
    splits = settings.splits if splits is None else splits
    partial_out = partial_lse = None
    if splits > 1:
        partial_out = torch.empty(query.shape[:2] + (splits, head_size), dtype=torch.float32, device=query.device)
        partial_lse = torch.empty(query.shape[:2] + (splits,), dtype=torch.float32, device=query.device)

    _decode_kernel[(num_sequences, num_kv_heads, splits)](
        query, kv_pool, block_table, kv_lengths, slots, out, partial_out, partial_lse,
        score_factor, window or 0,
        query.stride(0), out.stride(0), block_table.stride(0), *kv_pool.stride()[:3],
        HQ=num_heads, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)),
        B=tokens_per_block, D=head_size, D_POW2=head_pow2,
        SPLITS=splits, MIN_PAGES=MIN_PAGES_PER_SPLIT, STAGES=settings.num_stages,
        HAS_SLOTS=slots is not None, HAS_WINDOW=bool(window), SINK=sink if window else 0,
        CAP_LOG2=cap_log2,
        num_warps=settings.num_warps, num_stages=settings.num_stages,
    )
    return out if splits == 1 else paged_attention_merge(partial_out, partial_lse, out)
