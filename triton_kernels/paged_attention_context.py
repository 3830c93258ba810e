"""Causal attention of each sequence's new tokens (a whole prompt or a chunk) over its pages.

    query_length[c] = cu_seqlens[c + 1] - cu_seqlens[c]
    token r of sequence c has position p = kv_lengths[c] - query_length[c] + r
    and sees the keys k <= p with k > p - window or k < sink

Shapes      query                    [T, HQ, D]   T packed tokens of C sequences, HQ query heads of size D; heads
                                                  contiguous, any row stride
            kv_pool                  [N, 2, HK, B, D]   the pool of one layer: N blocks of B tokens, HK key heads; in
                                                        the dtype of the queries, or in e4m3 (torch.float8_e4m3fn).
                                                        It already has the keys and values of the new tokens
            block_table              [rows, max_blocks] int32   pages of each sequence in order. Entries of pages
                                                        without a visible key are not read: their blocks may belong
                                                        to another sequence.
            cu_seqlens               [C + 1] int32   sequence c owns query rows cu_seqlens[c] .. cu_seqlens[c + 1] - 1
            kv_lengths               [C] int32   keys of each sequence, including those of this step
            work_list                [W, 5] int32   from `context_work_list`, on the queries' device. Row
                                                    (c, m, i, n, r) is part i of n of the keys for the m-th tile
                                                    of new tokens of sequence c. The number of tokens in a tile is
                                                    `context_tile_rows`, or UNIFORM_ROWS with part_keys. The partial
                                                    results of the tile start at index r. -1 in the first column is
                                                    padding
            slots                    [C] int32   row of block_table for each sequence; None: row c
            out                      [T, HQ, D]   None: allocated
            alibi_slopes             [HQ] float32   None: no ALiBi bias
            sink_logits              [HQ] float32   None: no extra score
            part_starts              [S + 1] int32   from `context_work_list`; None: no tile is split. A tile
                                                     is split if n > 1. S is the number of tokens in split tiles
            merged_rows              [S] int32   from `context_work_list`; None: no tile is split
Units       window in tokens, None or 0 = no limit; scale > 0 is the factor on the scores.
            softcap: replace scores by softcap * tanh(scores / softcap), before the mask; None: no cap.
            alibi_slopes: add f(key position) - f(query position) to scores, after the cap and before the mask, with
            f(p) = slope * p. With alibi_bfloat16_factor > 0, f(p) = factor * bfloat16(slope * bfloat16(p)), as in
            Falcon; the slopes must then be representable in bfloat16.
            sink_logits: one extra score per head in the softmax, with a value of zeros. Unrelated to `sink`.
            sink: number of first tokens that stay visible outside the window (StreamingLLM, Xiao et al. 2023); ignored
            without a window. Positions are absolute: a key is rotated once, by its position, when it is written to the
            pool. It is not rotated again when tokens between it and the query leave the window.
            part_keys: keys of a fixed part, a multiple of 64; work_list must come from the same number, with tiles of
            UNIFORM_ROWS tokens. None: parts of any size. When set, the bits of a row depend on its query and keys
            alone: not on the other rows of its chunk, nor on how many programs share its keys. The bits of a token are
            then the same in a generation row (a context of one token) and in the middle of a prompt.
            key_scale, value_scale: a pool in e4m3 stores keys and values divided by them and rounded, see fp8.py; the
            result is that of the rounded numbers times their scales. 1 for a pool in another dtype.
            num_partials: number of partial results to allocate memory for; see `most_partials`.
            Without part_keys, the partition of the work list affects the last bits of the result.
Mutates     out, rows below cu_seqlens[C]. Later rows (generation, padding) are neither read nor written.
Needs       finite numbers for all B tokens of every page with a visible key: zero the pool once.
Oracle      triton_kernels/reference/paged_attention_context.py
Source      FlashAttention-2 (Dao 2023) over pages (Kwon et al. 2023), a group's heads in one tile as in FlashInfer
            (Ye et al. 2025), split over keys (Flash-Decoding, Dao et al. 2023); written for this project.

A program computes one tile of queries of one kv head. It walks the keys in tiles of at most 64 tokens of one page.
The queries of a kv head are numbered token by token, with the heads of the group next to each other. A chunk of few
tokens therefore needs only one tile of queries for the whole group. A row of the work list covers a tile of new
tokens. It starts as many programs as there are query heads. A full tile of new tokens keeps all these programs
busy. With a shorter tile of new tokens, programs without queries exit immediately.

The program of part i of n walks the i-th of n equal ranges of the key tiles that its queries see. A partial result
is an attention output and the logarithm of its sum of weights. A range can have no key that a query sees, or no key
at all. The query's output is then zero, and the logarithm is -inf. The first part counts the sink logits.
`paged_attention_merge` combines the partial results. The programs of an unsplit tile write to `out`. The number of
parts does not recompile the kernel.

With part_keys, the keys are cut into fixed parts of so many keys, counted from position 0. The keys of a layer with a
window are one part. The program of part i of n computes the results of the i-th of n equal ranges of the fixed parts.
The results of a row are combined one after another, from the first part on: by `paged_attention_merge`, or, if the
tile is not split, in registers, with the same function. A part without a key that a row sees changes no bit of it.

Tiles of keys that all rows see are walked without a mask. The tiles at the edge of the window come before these tiles
and need a mask. The tiles on the diagonal come after them and also need a mask. The tiles of the sinks are walked in
the same loop as the edge, and are numbered directly below the first tile of the edge. `sink` is a compile-time
constant, because an engine has one value; 0 adds no code.

Tiles of keys are numbered from position 0 and accumulated in this order, wherever a chunk begins. The chunk determines
only which loop walks a tile. A compiler may use a fused multiply-add in one loop and not in another. With part_keys,
one masked loop therefore walks all tiles, and one compiled kernel serves split and unsplit tiles.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .alibi import alibi, alibi_factors
from .context_work_list import UNIFORM_ROWS, WORK_COLUMNS, ContextHeads, context_tile_rows
from .device_limits import DeviceLimits, device_limits
from .fp8 import entries_of, widened
from .paged_attention_merge import added, paged_attention_merge, quotient
from .soft_cap import LOG2_E, score_factors, soft_cap
from .strides import heads_contiguous, pages_contiguous


@triton.jit
def _walk_tiles(
    begin, end,                                           # key tiles
    top, total, weighted,                                 # running softmax of the query rows
    query, query_position,
    slope,                                                # of the query rows; None: no ALiBi bias
    table_ptr, keys_ptr, score_factor, window,
    pool_stride_n, pool_stride_kv, window_tile, skipped,
    B: tl.constexpr, D: tl.constexpr, D_POW2: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, HAS_WINDOW: tl.constexpr, SINK: tl.constexpr, CAP_LOG2: tl.constexpr,
    HAS_ALIBI: tl.constexpr, ALIBI_FACTOR: tl.constexpr, WIDENS_FP8: tl.constexpr,
):
    """Attend to the key tiles with the numbers begin .. end - 1 and return the running softmax.

    Without sink tokens, the number of a tile is its index in the sequence. With sink tokens, the numbers leave out
    the tiles between the sinks and the window, to which no query of this program attends. `skipped` is the number
    of these tiles. `window_tile` is the index of the first tile of the window. From this tile on, the number of a
    tile is its index. The number of an earlier tile, which has sink tokens, is its index + skipped.
    """
    TILES_PER_PAGE: tl.constexpr = B // KEYS
    IS_SCALED: tl.constexpr = CAP_LOG2 > 0 or HAS_ALIBI   # scores are scaled before the softmax
    lane = tl.arange(0, D_POW2)
    token = tl.arange(0, KEYS)
    key_offset = token[None, :] * D + lane[:, None]                       # keys arrive transposed
    value_offset = pool_stride_kv + token[:, None] * D + lane[None, :]

    tile = begin
    if SINK > 0:
        tile = tl.where(begin < window_tile, begin - skipped, begin)
    block = tl.load(table_ptr + tile // TILES_PER_PAGE, mask=begin < end, other=0)
    for number in tl.range(begin, end, num_stages=STAGES):
        tile = number
        next_tile = number + 1
        if SINK > 0:
            tile = tl.where(number < window_tile, number - skipped, number)
            next_tile = tl.where(next_tile < window_tile, next_tile - skipped, next_tile)
        next_block = tl.load(table_ptr + next_tile // TILES_PER_PAGE, mask=number + 1 < end, other=0)
        tile_ptr = keys_ptr + block.to(tl.int64) * pool_stride_n + (tile % TILES_PER_PAGE) * (KEYS * D)
        if D == D_POW2:
            keys = tl.load(tile_ptr + key_offset)
        else:
            keys = tl.load(tile_ptr + key_offset, mask=(lane < D)[:, None], other=0.0)
        scores = tl.dot(query, widened(keys, query.dtype, WIDENS_FP8), input_precision="ieee")
        if CAP_LOG2 > 0:
            scores = soft_cap(scores * score_factor, CAP_LOG2)
        if HAS_ALIBI:
            if CAP_LOG2 == 0:
                scores = scores * score_factor
            key_position = (tile * KEYS + token)[None, :]
            scores += alibi(key_position, query_position[:, None], slope[:, None], ALIBI_FACTOR)
        if MASKED:
            position = (tile * KEYS + token)[None, :]
            visible = position <= query_position[:, None]
            if SINK > 0:
                visible = visible & ((position > query_position[:, None] - window) | (position < SINK))
            elif HAS_WINDOW:
                visible = visible & (position > query_position[:, None] - window)
            scores = tl.where(visible, scores, -float("inf"))

        if IS_SCALED:
            new_top = tl.maximum(top, tl.max(scores, 1))
        else:                                             # the scale is part of the exponent's fused multiply-add
            new_top = tl.maximum(top, tl.max(scores, 1) * score_factor)
        if MASKED:                                        # a row without a key so far: avoid -inf minus -inf
            pivot = tl.where(new_top > -float("inf"), new_top, 0.0)
        else:
            pivot = new_top
        if IS_SCALED:
            weights = tl.exp2(scores - pivot[:, None])
        else:
            weights = tl.exp2(scores * score_factor - pivot[:, None])
        shrink = tl.exp2(top - pivot)
        total = total * shrink + tl.sum(weights, 1)
        if D == D_POW2:
            values = tl.load(tile_ptr + value_offset)
        else:
            values = tl.load(tile_ptr + value_offset, mask=(lane < D)[None, :], other=0.0)
        weighted = weighted * shrink[:, None]
        values = widened(values, query.dtype, WIDENS_FP8)
        weighted = tl.dot(weights.to(values.dtype), values, weighted, input_precision="ieee")
        top = new_top
        block = next_block
    return top, total, weighted


# Slices of the index tensors start anywhere: their alignment must not recompile the kernel.
@triton.jit(
    do_not_specialize=["window", "table_stride"],
    do_not_specialize_on_alignment=["block_table_ptr", "cu_seqlens_ptr", "kv_length_ptr", "work_ptr", "slot_ptr"],
)
def _context_kernel(
    query_ptr, kv_pool_ptr, block_table_ptr, cu_seqlens_ptr, kv_length_ptr, work_ptr, slot_ptr,
    out_ptr, partial_out_ptr, partial_lse_ptr,            # out: tiles in one part; the other two: split ones
    slope_ptr, sink_logit_ptr,                            # None: see HAS_ALIBI and HAS_SINK_LOGITS
    value_scale,                                          # of codes of e4m3; see `narrowed`
    score_factor, window,                                 # see `score_factors`; the factor includes key_scale
    query_stride_t, out_stride_t, table_stride,           # elements from one token, or table row, to the next
    pool_stride_n, pool_stride_kv, pool_stride_h,         # elements between blocks, K and V, heads
    WORK_COLUMNS: tl.constexpr, HQ: tl.constexpr, GROUP: tl.constexpr,
    B: tl.constexpr, D: tl.constexpr, D_POW2: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    HAS_SLOTS: tl.constexpr, HAS_WINDOW: tl.constexpr, SINK: tl.constexpr, CAP_LOG2: tl.constexpr,
    PART_TILES: tl.constexpr,                             # key tiles of a fixed part; 0: parts are not fixed
    HAS_ALIBI: tl.constexpr, SLOPE_FACTOR: tl.constexpr, ALIBI_FACTOR: tl.constexpr,      # see `alibi_factors`
    HAS_SINK_LOGITS: tl.constexpr, LOG2_E: tl.constexpr,
    WIDENS_FP8: tl.constexpr,                             # see `widened`
):
    head = tl.program_id(0)                               # tiles of a group run concurrently and share their keys
    work = tl.program_id(1)
    work_ptr += WORK_COLUMNS * work
    sequence = tl.load(work_ptr)
    if sequence < 0:
        return
    token_tile = tl.load(work_ptr + 1)
    part = tl.load(work_ptr + 2)
    num_parts = tl.load(work_ptr + 3)
    partial = tl.load(work_ptr + 4)                       # -1: the only part of its tile

    query_begin = tl.load(cu_seqlens_ptr + sequence)
    query_length = tl.load(cu_seqlens_ptr + sequence + 1) - query_begin
    computed = tl.load(kv_length_ptr + sequence) - query_length           # keys from before this step
    table_row = sequence.to(tl.int64)
    if HAS_SLOTS:
        table_row = tl.load(slot_ptr + sequence).to(tl.int64)
    table_ptr = block_table_ptr + table_row * table_stride

    # Query n of a kv head belongs to token n // GROUP and to head n % GROUP of the group.
    num_queries = query_length * GROUP
    first_query = (token_tile * GROUP + head % GROUP) * ROWS
    if first_query >= num_queries:
        return
    number = first_query + tl.arange(0, ROWS)
    row = number // GROUP
    lane = tl.arange(0, D_POW2)
    row_inside = (number < num_queries)[:, None] & (lane < D)[None, :]
    token = (query_begin + row).to(tl.int64)[:, None]
    entry = (head - head % GROUP + number % GROUP)[:, None] * D + lane[None, :]
    query = tl.load(query_ptr + token * query_stride_t + entry, mask=row_inside, other=0.0)

    first_position = computed + first_query // GROUP
    last_position = computed + (tl.minimum(first_query + ROWS, num_queries) - 1) // GROUP
    query_position = computed + row
    end = last_position // KEYS + 1
    begin_diagonal = (first_position + 1) // KEYS         # tiles before it have no key after first_position
    begin = 0
    begin_full = 0
    if HAS_WINDOW:
        begin = tl.maximum(first_position - window + 1, 0) // KEYS
        begin_full = tl.cdiv(tl.maximum(last_position + 1 - window, 0), KEYS)
        begin_full = tl.minimum(tl.maximum(begin_full, begin), end)
        begin_diagonal = tl.maximum(begin_diagonal, begin_full)
        if PART_TILES > 0:
            begin_full = end                              # one masked loop for all tiles
    window_tile = begin
    skipped = 0                                           # tiles between the sinks and the window
    if SINK > 0:
        skipped = tl.maximum(window_tile - (SINK + KEYS - 1) // KEYS, 0)
        begin = skipped
    # A tile has one result per part, and a program computes one. With fixed parts, it computes those of several.
    num_results = num_parts
    first_result = part
    count = 1
    if PART_TILES > 0:
        num_results = 1
        if not HAS_WINDOW:
            last_of_tile = computed + tl.minimum((token_tile + 1) * ROWS, query_length) - 1
            num_results = last_of_tile // (PART_TILES * KEYS) + 1
        first_result = num_results * part // num_parts
        count = num_results * (part + 1) // num_parts - first_result

    keys_ptr = kv_pool_ptr + (head // GROUP) * pool_stride_h
    slope = None
    if HAS_ALIBI:
        slope = tl.load(slope_ptr + head - head % GROUP + number % GROUP) * SLOPE_FACTOR
    merged_top = tl.full([ROWS], -float("inf"), tl.float32)
    merged_total = tl.zeros([ROWS], tl.float32)
    merged = tl.zeros([ROWS, D_POW2], tl.float32)
    for step in tl.range(0, count, disable_licm=True):
        index = first_result + step
        if PART_TILES == 0 or HAS_WINDOW:
            part_begin = begin + (end - begin) * index // num_results
            part_end = begin + (end - begin) * (index + 1) // num_results
        else:
            part_begin = index * PART_TILES
            part_end = tl.minimum(part_begin + PART_TILES, end)
        top = tl.full([ROWS], -float("inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        if HAS_SINK_LOGITS:                               # the running softmax starts from the sink logit
            sink_logit = tl.load(sink_logit_ptr + head - head % GROUP + number % GROUP) * LOG2_E
            top = tl.where(index == 0, sink_logit, top)
            total += tl.where(index == 0, 1.0, 0.0)
        weighted = tl.zeros([ROWS, D_POW2], tl.float32)
        if HAS_WINDOW:
            top, total, weighted = _walk_tiles(
                part_begin, tl.minimum(begin_full, part_end), top, total, weighted, query, query_position, slope,
                table_ptr, keys_ptr, score_factor, window, pool_stride_n, pool_stride_kv, window_tile, skipped, B, D,
                D_POW2, KEYS, STAGES,
                MASKED=True, HAS_WINDOW=True, SINK=SINK, CAP_LOG2=CAP_LOG2, HAS_ALIBI=HAS_ALIBI,
                ALIBI_FACTOR=ALIBI_FACTOR, WIDENS_FP8=WIDENS_FP8,
            )
        if PART_TILES == 0:
            top, total, weighted = _walk_tiles(
                tl.maximum(begin_full, part_begin), tl.minimum(begin_diagonal, part_end), top, total, weighted, query,
                query_position, slope, table_ptr, keys_ptr, score_factor, window, pool_stride_n, pool_stride_kv, 0, 0,
                B, D, D_POW2, KEYS, STAGES,
                MASKED=False, HAS_WINDOW=HAS_WINDOW, SINK=0, CAP_LOG2=CAP_LOG2, HAS_ALIBI=HAS_ALIBI,
                ALIBI_FACTOR=ALIBI_FACTOR, WIDENS_FP8=WIDENS_FP8,
            )
            part_begin = tl.maximum(begin_diagonal, part_begin)
        if PART_TILES == 0 or not HAS_WINDOW:
            top, total, weighted = _walk_tiles(
                part_begin, part_end, top, total, weighted, query, query_position, slope, table_ptr, keys_ptr,
                score_factor, window, pool_stride_n, pool_stride_kv, 0, 0, B, D, D_POW2, KEYS, STAGES,
                MASKED=True, HAS_WINDOW=HAS_WINDOW, SINK=0, CAP_LOG2=CAP_LOG2, HAS_ALIBI=HAS_ALIBI,
                ALIBI_FACTOR=ALIBI_FACTOR, WIDENS_FP8=WIDENS_FP8,
            )
        result = weighted / tl.where(total > 0, total, 1.0)[:, None]      # some rows may see no key
        if kv_pool_ptr.dtype.element_ty == tl.uint8:
            result = result * value_scale
        lse = top + tl.log2(total)
        if partial >= 0:
            partial_row = (partial + (row - token_tile * ROWS) * num_results + index).to(tl.int64)
            tl.store(partial_out_ptr + partial_row[:, None] * (HQ * D) + entry, result, mask=row_inside)
            partial_head = partial_row * HQ + head - head % GROUP + number % GROUP
            tl.store(partial_lse_ptr + partial_head, lse, mask=number < num_queries)
        if PART_TILES > 0:
            merged_top, merged_total, merged = added(merged_top, merged_total, merged, lse, result)
        else:
            merged = result
    if partial < 0:
        if PART_TILES > 0:
            merged = quotient(merged_total, merged)
        tl.store(out_ptr + token * out_stride_t + entry, merged.to(out_ptr.dtype.element_ty), mask=row_inside)


class ContextSettings(NamedTuple):
    """Launch settings.

    rows, keys              query rows and keys of a tile
    num_warps, num_stages   warps and pipeline stages of one program
    """

    rows: int
    keys: int
    num_warps: int
    num_stages: int


def context_settings(
    head_size_pow2: int, element_size_bytes: int, tokens_per_block: int, limits: DeviceLimits,
    uniform_rows: int | None = None,
) -> ContextSettings:
    """Return the launch settings. They depend only on shapes.

    Shared memory holds a tile of keys and a tile of values per pipeline stage. It also holds the queries if matrix
    instructions read them from shared memory. A tile has at most 64 keys. If a key of one head has more than 128 bytes,
    a tile has at most 32 keys in two cases: the keys are float32, or matrix instructions read their operands from
    registers, which cannot hold 64 such keys.
    """
    rows = context_tile_rows(head_size_pow2, element_size_bytes) if uniform_rows is None else uniform_rows
    row_bytes = head_size_pow2 * element_size_bytes
    wide = row_bytes <= 128 or (limits.operands_in_shared and element_size_bytes < 4)
    keys = min(tokens_per_block, 64 if wide else 32)
    num_stages = 3
    while num_stages > 1 and _shared_bytes(rows, keys, num_stages, row_bytes, limits) > limits.shared_bytes:
        num_stages -= 1
    return ContextSettings(rows, keys, num_warps=8 if uniform_rows is None else 4, num_stages=num_stages)


def _shared_bytes(rows: int, keys: int, num_stages: int, row_bytes: int, limits: DeviceLimits) -> int:
    """Return an upper estimate of the shared memory of a program.

    row_bytes   bytes of a query, key or value of one head
    """
    scratch_bytes = 4096
    query_bytes = rows * row_bytes if limits.operands_in_shared else 0
    return query_bytes + num_stages * 2 * keys * row_bytes + scratch_bytes


def context_heads(num_heads: int, num_kv_heads: int, head_size: int, element_size_bytes: int,
                  tokens_per_block: int, limits: DeviceLimits, part_keys: int | None = None) -> ContextHeads:
    """Return the argument `heads` of `context_work_list`.

    part_keys   as in `paged_attention_context`

    The field resident_programs of the result is an estimate from shared memory and warps.
    """
    head_pow2 = max(16, triton.next_power_of_2(head_size))
    settings = context_settings(head_pow2, element_size_bytes, tokens_per_block, limits,
                                UNIFORM_ROWS if part_keys else None)
    shared_bytes = _shared_bytes(settings.rows, settings.keys, settings.num_stages, head_pow2 * element_size_bytes,
                                 limits)
    resident = max(1, min(limits.shared_bytes // shared_bytes, 16 // settings.num_warps))
    return ContextHeads(num_heads, num_kv_heads, resident * limits.multiprocessors, part_keys)


def paged_attention_context(
    query, kv_pool, block_table, cu_seqlens, kv_lengths, work_list, scale, window=None, slots=None, out=None, sink=0,
    part_keys=None, softcap=None, alibi_slopes=None, alibi_bfloat16_factor=None, sink_logits=None,
    part_starts=None, merged_rows=None, num_partials=0, key_scale=1.0, value_scale=1.0,
):
    """Compute the attention of each sequence's new tokens. Returns out. See the module docstring for shapes."""
    num_heads, head_size = query.shape[1:]
    num_kv_heads, tokens_per_block = kv_pool.shape[2:4]
    group = num_heads // num_kv_heads
    head_pow2 = max(16, triton.next_power_of_2(head_size))
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    assert num_heads == group * num_kv_heads
    assert heads_contiguous(query) and heads_contiguous(out) and pages_contiguous(kv_pool)
    assert block_table.stride(1) == 1 and work_list.is_contiguous() and kv_lengths.is_contiguous()
    assert work_list.shape[1] == WORK_COLUMNS
    if len(work_list) == 0:
        return out
    assert alibi_slopes is None or alibi_slopes.shape == (num_heads,) and alibi_slopes.is_contiguous()
    assert sink_logits is None or sink_logits.shape == (num_heads,) and sink_logits.is_contiguous()
    score_factor, cap_log2 = score_factors(scale * key_scale, softcap)
    slope_factor, alibi_factor = alibi_factors(alibi_bfloat16_factor)

    # With None for them when no tile is split, the kernel would be compiled in two variants.
    num_partials = 0 if part_starts is None else num_partials
    partial_out = torch.empty((num_partials, num_heads, head_size), dtype=torch.float32, device=query.device)
    partial_lse = torch.empty((num_partials, num_heads), dtype=torch.float32, device=query.device)
    limits = device_limits()
    settings = context_settings(head_pow2, query.element_size(), tokens_per_block, limits,
                                None if part_keys is None else UNIFORM_ROWS)
    assert part_keys is None or part_keys % settings.keys == 0
    _context_kernel[(num_heads, len(work_list))](
        query, entries_of(kv_pool, query.dtype, key_scale, value_scale), block_table, cu_seqlens, kv_lengths, work_list,
        slots, out, partial_out, partial_lse, alibi_slopes, sink_logits,
        value_scale, score_factor, window or 0,
        query.stride(0), out.stride(0), block_table.stride(0), *kv_pool.stride()[:3],
        WORK_COLUMNS=WORK_COLUMNS, HQ=num_heads, GROUP=group, B=tokens_per_block, D=head_size, D_POW2=head_pow2,
        ROWS=settings.rows, KEYS=settings.keys, STAGES=settings.num_stages,
        HAS_SLOTS=slots is not None, HAS_WINDOW=bool(window), SINK=sink if window else 0,
        CAP_LOG2=cap_log2, PART_TILES=(part_keys or 0) // settings.keys,
        HAS_ALIBI=alibi_slopes is not None, SLOPE_FACTOR=slope_factor, ALIBI_FACTOR=alibi_factor,
        HAS_SINK_LOGITS=sink_logits is not None, LOG2_E=LOG2_E, WIDENS_FP8=limits.widens_fp8,
        num_warps=settings.num_warps, num_stages=settings.num_stages,
    )
    return out if part_starts is None else paged_attention_merge(partial_out, partial_lse, part_starts, out,
                                                                 merged_rows)
