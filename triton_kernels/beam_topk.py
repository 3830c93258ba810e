"""The best continuations of groups of beams.

    log_prob = log_softmax(logits / temperature)                      temperature 0 means 1
             = logits, in rows with are_log_probs
    rank     = number of better tokens in the same row                larger log_prob first, then lower id
    score    = cum_log_probs of the row + log_prob - diversity_rate of the group * rank
    Returns the num_candidates largest scores of each group, best first; ties: first row, then lower rank

Shapes      logits          [R, V]   any float dtype, R rows (beams) of V tokens, contiguous rows, any row stride;
                                     -inf = forbidden token
            temperature     [R] float32
            cum_log_probs   [R] float32   -inf: the row has no candidates
            diversity_rate  [G] float32   >= 0; 0: scores are sums of log-probs
            group_starts    [G + 1] int32   group g has the rows group_starts[g] .. group_starts[g + 1] - 1
            num_candidates  K >= 1
            max_rows        at least the number of rows of the largest group
            are_log_probs   [R] bool   the logits of the row are log-probs and are used as they are; None: in no row
Returns     log_probs       [G, K] float32   log-prob of the token alone; -inf past the last candidate of a group
            parents         [G, K] int32   row within the group; 0 past the last candidate
            tokens          [G, K] int32   0 past the last candidate
            finite          [R] bool   False for a row with NaN or +inf, or only -inf; such a row has no candidates
Oracle      triton_kernels/reference/beam_topk.py
Source      top-k of blocks, then rows, then groups; written for this project.

The diversity penalty grows with the rank, so it never reorders the tokens of a row. The best candidates of a group are
therefore among the K largest logits of each of its rows. Each row is divided into blocks of tokens. The K largest
logits of a row are among the K largest logits of each of its blocks.

A program of the first kernel finds the K largest logits of one block. It removes the maximum K times while the block
stays in registers, so each logit is read once. The second kernel merges the lists of the blocks of a row. The third
kernel merges the lists of the rows of a group. Both hold the first remaining entry of each list. K times, they take the
best of these entries and load the next entry of the list that it came from. K is unlimited, because registers hold only
a block, or one entry per block or row.
"""

import torch
import triton
import triton.language as tl

MAX_BLOCK = 4096                        # logits that one program keeps in registers
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _inverse_log2(temperature_ptr, row):
    """Return log2(e) / temperature, for exponentials of base 2; temperature 0 counts as 1.

    The result is limited to 1e38: infinity times a logit difference of 0 would be NaN.
    """
    temperature = tl.load(temperature_ptr + row)
    return tl.minimum(LOG2_E / tl.where(temperature == 0.0, 1.0, temperature), 1e38)


# Slices of the per-row tensors start anywhere, and the number of candidates varies: neither may recompile the kernel.
@triton.jit(do_not_specialize=["num_kept"], do_not_specialize_on_alignment=["temperature_ptr"])
def _beam_block_kernel(
    logits_ptr, temperature_ptr,
    value_ptr, token_ptr,               # [R, blocks, kept]: largest logits of the block, descending, and their ids
    top_ptr, total_ptr, broken_ptr,     # [R, blocks]: largest logit, sum of weights, whether there is NaN or +inf
    num_tokens,                         # V
    logits_stride_r,                    # elements from one row to the next
    num_kept,                           # entries of the list of a block: min(K, block size)
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    lane = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * logits_stride_r + lane, mask=lane < num_tokens, other=-float("inf")).to(tl.float32)

    top = tl.maximum(tl.max(x, 0), LOWEST)               # not -inf: -inf minus -inf is NaN
    total = tl.sum(tl.exp2((x - top) * _inverse_log2(temperature_ptr, row)), 0)
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
    row_log_prob_ptr, row_token_ptr,    # [R, K]: candidates of the row, descending; -inf past the last
    finite_ptr,
    num_candidates, num_kept, num_blocks,
    BLOCKS: tl.constexpr,               # number of blocks, rounded up to a power of two
):
    row = tl.program_id(0).to(tl.int64)
    inverse_log2 = _inverse_log2(temperature_ptr, row)
    block = tl.arange(0, BLOCKS)
    there = block < num_blocks
    tops = tl.load(top_ptr + row * num_blocks + block, mask=there, other=LOWEST)
    totals = tl.load(total_ptr + row * num_blocks + block, mask=there, other=0.0)
    broken = tl.max(tl.load(broken_ptr + row * num_blocks + block, mask=there, other=0), 0)
    top = tl.max(tops, 0)
    total = tl.sum(totals * tl.exp2((tops - top) * inverse_log2), 0)
    finite = (broken == 0) & (total > 0.0)
    tl.store(finite_ptr + row, finite.to(finite_ptr.dtype.element_ty))
    are_log_probs = tl.load(are_log_probs_ptr + row) != 0
    usable = finite & (tl.load(cum_log_prob_ptr + row) > -float("inf"))

    # Blocks are in the order of ids, so among equal entries the entry of the first block is taken.
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
        log_prob = tl.where(are_log_probs, value, ((value - top) * inverse_log2 - tl.log2(total)) * LN_2)
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
    ROWS: tl.constexpr,                 # rows of the largest group, rounded up to a power of two
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
    """Return the best continuations of each group. See the module docstring for shapes."""
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
