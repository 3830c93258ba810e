"""The best continuations of groups of beams.

    log_prob = log_softmax(logits / temperature)                      temperature 0 counts as 1
             = logits, in the rows where these are log-probs
    rank     = how many tokens of the same row come before it         larger log_prob first, then the lower id
    score    = cum_log_probs of the row + log_prob - diversity_rate of the group * rank
    the num_candidates largest scores of each group, best first; among equals the first row, then the lower rank

Shapes      logits          [R, V]   any float dtype, contiguous rows, any row stride; -inf = forbidden token
            temperature     [R] float32
            cum_log_probs   [R] float32   -inf: a row that yields nothing
            diversity_rate  [G] float32   0 and more; 0: the scores are the sums of log-probs
            group_starts    [G + 1] int32   group g is the rows group_starts[g] .. group_starts[g + 1] - 1
            num_candidates  K >= 1
            max_rows        rows of the largest group, at least
            are_log_probs   [R] bool: the row was made log-probs already, and whatever was done to them since counts:
                            they are taken as they are, and may be any numbers; None: no row
Returns     log_probs       [G, K] float32   of the token, without what came before; -inf where there are fewer than K
            parents         [G, K] int32   the row within its group; 0 where there are fewer
            tokens          [G, K] int32   0 where there are fewer
            finite          [R] bool   False where a row holds NaN or +inf or nothing but -inf; it yields nothing
Oracle      triton_kernels/reference/beam_topk.py
Source      top-k of blocks, of rows, of groups; written for this project.

A penalty by rank never lets a token of a row overtake a larger one of that row, so the best of a group are among the K
largest logits of its rows, and those are among the K largest of each block of logits. One program finds these for one
block, best first, taking the largest out K times while the block stays in registers; each logit is read once. A second
kernel merges the lists of a row's blocks, a third those of a group's rows. Both hold the first entry left of each list,
take the best of these K times, and load the next entry of the list it was in. So K may be any number: registers hold a
block, or one entry for each block or row.
"""

import torch
import triton
import triton.language as tl

MAX_BLOCK = 4096                        # logits one program keeps in registers
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _heat_log2(temperature_ptr, row):
    """1 / temperature for exponentials of base 2; finite, as 0 * inf would be NaN."""
    temperature = tl.load(temperature_ptr + row)
    return tl.minimum(LOG2_E / tl.where(temperature == 0.0, 1.0, temperature), 1e38)


# Slices of the per-row tensors start anywhere, and steps have any number of candidates: neither makes a variant.
@triton.jit(do_not_specialize=["num_kept"], do_not_specialize_on_alignment=["temperature_ptr"])
def _beam_block_kernel(
    logits_ptr, temperature_ptr,
    value_ptr, token_ptr,               # [R, blocks, kept]: the largest logits of the block, falling, and their ids
    top_ptr, total_ptr, broken_ptr,     # [R, blocks]: largest logit, sum of the weights, whether there is a non-number
    num_tokens,                         # V
    logits_stride_r,                    # elements from one row to the next
    num_kept,                           # entries of a block's list: K, or the block's size where that is less
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    lane = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * logits_stride_r + lane, mask=lane < num_tokens, other=-float("inf")).to(tl.float32)

    top = tl.maximum(tl.max(x, 0), LOWEST)               # not -inf: -inf minus -inf is NaN
    total = tl.sum(tl.exp2((x - top) * _heat_log2(temperature_ptr, row)), 0)
    broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    place = row * tl.num_programs(1) + block
    tl.store(top_ptr + place, top)
    tl.store(total_ptr + place, total)
    tl.store(broken_ptr + place, broken)

    for candidate in range(num_kept):
        value = tl.max(x, 0)
        token = tl.min(tl.where(x == value, lane, num_tokens), 0)
        tl.store(value_ptr + place * num_kept + candidate, value)
        tl.store(token_ptr + place * num_kept + candidate, token)
        x = tl.where(lane == token, -float("inf"), x)


@triton.jit(
    do_not_specialize=["num_candidates", "num_kept", "num_blocks"],
    do_not_specialize_on_alignment=["temperature_ptr", "cum_log_prob_ptr", "are_log_probs_ptr"],
)
def _beam_row_kernel(
    temperature_ptr, cum_log_prob_ptr, are_log_probs_ptr, value_ptr, token_ptr, top_ptr, total_ptr, broken_ptr,
    row_log_prob_ptr, row_token_ptr,    # [R, K]: the largest of the row, falling; -inf where there are none
    finite_ptr,
    num_candidates, num_kept, num_blocks,
    BLOCKS: tl.constexpr,               # the power of two that holds the blocks
):
    row = tl.program_id(0).to(tl.int64)
    heat_log2 = _heat_log2(temperature_ptr, row)
    block = tl.arange(0, BLOCKS)
    there = block < num_blocks
    tops = tl.load(top_ptr + row * num_blocks + block, mask=there, other=LOWEST)
    totals = tl.load(total_ptr + row * num_blocks + block, mask=there, other=0.0)
    broken = tl.max(tl.load(broken_ptr + row * num_blocks + block, mask=there, other=0), 0)
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp2((tops - top) * heat_log2), 0)
    finite = (broken == 0) & (total > 0.0)
    tl.store(finite_ptr + row, finite.to(finite_ptr.dtype.element_ty))
    are_log_probs = tl.load(are_log_probs_ptr + row) != 0
    usable = finite & (tl.load(cum_log_prob_ptr + row) > -float("inf"))

    # The lists of the blocks, which lie in the order of ids: of equal entries the first block's is taken.
    values_ptr = value_ptr + row * num_blocks * num_kept + block * num_kept
    tokens_ptr = token_ptr + row * num_blocks * num_kept
    usable_blocks = tl.where(usable, num_blocks, 0)
    taken = tl.zeros((BLOCKS,), tl.int32)
    values = tl.load(values_ptr, mask=block < usable_blocks, other=-float("inf"))
    for candidate in range(num_candidates):
        value = tl.max(values, 0)
        chosen = tl.min(tl.where((values == value) & (block < usable_blocks), block, BLOCKS), 0)
        exists = value > -float("inf")
        is_chosen = block == chosen
        rank = tl.sum(tl.where(is_chosen, taken, 0), 0)
        token = tl.load(tokens_ptr + chosen * num_kept + rank, mask=exists, other=0)
        log_prob = tl.where(are_log_probs, value, ((value - top) * heat_log2 - tl.log2(total)) * LN_2)
        tl.store(row_log_prob_ptr + row * num_candidates + candidate, tl.where(exists, log_prob, -float("inf")))
        tl.store(row_token_ptr + row * num_candidates + candidate, token)
        taken += is_chosen.to(tl.int32)
        values = tl.where(is_chosen, tl.load(values_ptr + taken, mask=is_chosen & (taken < num_kept),
                                             other=-float("inf")), values)


@triton.jit(
    do_not_specialize=["num_candidates"],
    do_not_specialize_on_alignment=["cum_log_prob_ptr", "diversity_rate_ptr", "group_start_ptr"],
)
def _beam_group_kernel(
    cum_log_prob_ptr, diversity_rate_ptr, group_start_ptr, row_log_prob_ptr, row_token_ptr,
    log_prob_ptr, parent_ptr, token_ptr,
    num_candidates,
    ROWS: tl.constexpr,                 # the power of two that holds the rows of the largest group
):
    group = tl.program_id(0)
    begin = tl.load(group_start_ptr + group).to(tl.int64)
    num_rows = tl.load(group_start_ptr + group + 1).to(tl.int64) - begin
    rate = tl.load(diversity_rate_ptr + group)

    row = tl.arange(0, ROWS)
    there = row < num_rows
    sums = tl.load(cum_log_prob_ptr + begin + row, mask=there, other=0.0)
    log_probs_ptr = row_log_prob_ptr + (begin + row) * num_candidates
    taken = tl.zeros((ROWS,), tl.int32)
    scores = sums + tl.load(log_probs_ptr, mask=there, other=-float("inf"))
    for candidate in range(num_candidates):
        best = tl.max(scores, 0)
        chosen = tl.min(tl.where((scores == best) & there, row, ROWS), 0)
        exists = best > -float("inf")
        is_chosen = row == chosen
        rank = tl.sum(tl.where(is_chosen, taken, 0), 0)
        source = (begin + chosen) * num_candidates + rank
        place = group.to(tl.int64) * num_candidates + candidate
        tl.store(log_prob_ptr + place, tl.load(row_log_prob_ptr + source, mask=exists, other=-float("inf")))
        tl.store(parent_ptr + place, tl.where(exists, chosen, 0))
        tl.store(token_ptr + place, tl.load(row_token_ptr + source, mask=exists, other=0))
        taken += is_chosen.to(tl.int32)
        following = tl.load(log_probs_ptr + taken, mask=is_chosen & (taken < num_candidates), other=-float("inf"))
        scores = tl.where(is_chosen, sums + following - rate * taken.to(tl.float32), scores)


def beam_topk(logits, temperature, cum_log_probs, diversity_rate, group_starts, num_candidates, max_rows,
              are_log_probs=None):
    """The best continuations of each group; see the module's docstring for shapes."""
    (num_rows, vocabulary), num_groups, device = logits.shape, len(diversity_rate), logits.device
    log_probs = torch.empty((num_groups, num_candidates), dtype=torch.float32, device=device)
    parents = torch.empty((num_groups, num_candidates), dtype=torch.int32, device=device)
    tokens = torch.empty((num_groups, num_candidates), dtype=torch.int32, device=device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=device)
    assert logits.stride(1) == 1
    if num_groups == 0:
        return log_probs, parents, tokens, finite
    if are_log_probs is None:
        are_log_probs = torch.zeros(num_rows, dtype=torch.bool, device=device)

    block = min(MAX_BLOCK, triton.next_power_of_2(vocabulary))
    num_blocks, num_kept = triton.cdiv(vocabulary, block), min(num_candidates, block)
    values = torch.empty((num_rows, num_blocks, num_kept), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, num_blocks, num_kept), dtype=torch.int32, device=device)
    tops, totals = torch.empty((2, num_rows, num_blocks), dtype=torch.float32, device=device)
    broken = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=device)
    _beam_block_kernel[(num_rows, num_blocks)](
        logits, temperature, values, ids, tops, totals, broken, vocabulary, logits.stride(0), num_kept,
        BLOCK=block, num_warps=8,
    )
    row_log_probs = torch.empty((num_rows, num_candidates), dtype=torch.float32, device=device)
    row_tokens = torch.empty((num_rows, num_candidates), dtype=torch.int32, device=device)
    _beam_row_kernel[(num_rows,)](
        temperature, cum_log_probs, are_log_probs, values, ids, tops, totals, broken, row_log_probs, row_tokens, finite,
        num_candidates, num_kept, num_blocks,
        BLOCKS=triton.next_power_of_2(num_blocks), num_warps=1,
    )
    _beam_group_kernel[(num_groups,)](
        cum_log_probs, diversity_rate, group_starts, row_log_probs, row_tokens, log_probs, parents, tokens,
        num_candidates, ROWS=triton.next_power_of_2(max_rows), num_warps=1,
    )
    return log_probs, parents, tokens, finite
