"""Draw one token per row of logits.

    x    = logits / temperature,  p = softmax(x)
    keep = the top_k largest logits (ties of the last one kept), then, in what they renormalise to, the smallest set of
           largest probabilities whose sum reaches top_p (ties of the last one kept); of these, the logits that are at
           least max(logits) + temperature * log(min_p)
    u    = uniform(seed, position), from `philox`
    token    = the smallest id whose cumulative kept probability, in id order, exceeds u * (sum of the kept)
    log_prob = log p[token], before any filtering

Shapes      logits                   [R, V]   any float dtype, contiguous rows, any row stride; -inf = forbidden token
            temperature              [R] float32   0: greedy, and the log-prob is that of temperature 1
            top_k                    [R] int32   0: no limit by count
            top_p                    [R] float32   0 with top_k > 0, or 1 and more: no limit by mass
            min_p                    [R] float32   0, or None: no limit below the largest
            seed                     [R] int64   the bits of the request's unsigned seed
            position                 [R] int32   position of the token being drawn in its sequence
            tokens                   [R] int32 (or any integer dtype)      these three may be passed in, so that
            log_probs                [R] float32                           a captured graph writes to fixed places
            finite                   [R] bool
            wants_log_prob           [R] bool on the host: rows whose log-prob is looked at; those of the others may be
                                     anything. None: all
Greedy      temperature == 0, or top_k == 1, or top_k == 0 and top_p == 0: the largest logit, the lowest id among
            equals.
Mutates     tokens, log_probs, finite. finite is False where a row holds NaN or +inf or nothing but -inf; the token is
            then 0 and the log-prob NaN.
Oracle      triton_kernels/reference/sample_token.py
Source      inverse transform sampling; the thresholds by bisection instead of a sort; written for this project.

One program is one row, and a row's result depends on nothing but that row. A greedy row is read once. A filtered one
is read once per step of the bisection: floats are bisected as the integers that order like them, and each step moves
the bracket on to logits that occur in the row, so it ends after about as many steps as its logits have bits of rank.
"""

import torch
import triton
import triton.language as tl

from .philox import philox_uniform

MAX_BLOCK = 4096                        # logits looked at together
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def _load_block(row_ptr, start, num_tokens, BLOCK: tl.constexpr):
    """Logits start .. start + BLOCK - 1 in float32, -inf past the end."""
    token = start + tl.arange(0, BLOCK)
    return tl.load(row_ptr + token, mask=token < num_tokens, other=-float("inf")).to(tl.float32)


@triton.jit
def _order_of(x):
    """The int64 that orders like the float32 `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _float_of(order):
    """Inverse of `_order_of`."""
    bits = order.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _threshold(
    row_ptr, num_tokens, lowest, highest, target, top, heat_log2, BY_MASS: tl.constexpr, BLOCK: tl.constexpr
):
    """The largest logit t between `lowest` and `highest` for which the logits >= t reach `target`.

    What they reach is their number, or with BY_MASS the sum of their weights. `lowest` must reach it. Every pivot is
    above -inf, so the -inf past the end of the row never counts.
    """
    low = _order_of(lowest)
    high = _order_of(highest)
    while low < high:
        middle = low + (high - low + 1) // 2
        pivot = _float_of(middle)
        reached = tl.zeros([BLOCK], tl.float32)
        smallest_above = tl.full([BLOCK], float("inf"), tl.float32)
        largest_below = tl.full([BLOCK], -float("inf"), tl.float32)
        for start in range(0, num_tokens, BLOCK):
            x = _load_block(row_ptr, start, num_tokens, BLOCK)
            above = x >= pivot
            if BY_MASS:
                reached += tl.where(above, tl.exp2((x - top) * heat_log2), 0.0)
            else:
                reached += tl.where(above, 1.0, 0.0)
            smallest_above = tl.minimum(smallest_above, tl.where(above, x, float("inf")))
            largest_below = tl.maximum(largest_below, tl.where(above, -float("inf"), x))
        if tl.sum(reached, 0) >= target:
            low = tl.maximum(middle, _order_of(tl.min(smallest_above, 0)))
        else:
            high = tl.minimum(middle - 1, _order_of(tl.max(largest_below, 0)))
        high = tl.maximum(high, low)
    return _float_of(low)


@triton.jit
def _kept_weights(row_ptr, start, num_tokens, threshold, top, heat_log2, BLOCK: tl.constexpr):
    """Unnormalised probabilities of a block, zero below the threshold."""
    x = _load_block(row_ptr, start, num_tokens, BLOCK)
    return tl.where(x >= threshold, tl.exp2((x - top) * heat_log2), 0.0)


# Slices of the per-row tensors start anywhere: their alignment must not make a variant of the kernel.
@triton.jit(
    do_not_specialize_on_alignment=[
        "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr", "token_ptr",
        "log_prob_ptr", "finite_ptr",
    ],
)
def _sample_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    token_ptr, log_prob_ptr, finite_ptr,
    num_tokens,                         # V
    logits_stride_r,                    # elements from one row to the next
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride_r
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    greedy = (temperature == 0.0) | (top_k == 1) | ((top_k == 0) & (top_p == 0.0))
    heat = tl.where(temperature == 0.0, 1.0, temperature)
    heat_log2 = tl.minimum(LOG2_E / heat, 1e38)           # 0 * inf is NaN: stay finite

    # One read of the row: largest logit and its lowest id, sum of weights, anything that is not a logit.
    lane = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], LOWEST, tl.float32)           # not -inf: -inf minus -inf is NaN
    best_token = tl.zeros([BLOCK], tl.int32)
    total = tl.zeros([BLOCK], tl.float32)
    broken = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_tokens, BLOCK):
        x = _load_block(row_ptr, start, num_tokens, BLOCK)
        broken = broken | ((x != x) | (x == float("inf"))).to(tl.int32)
        larger = (x > best) | ((total == 0.0) & (x > -float("inf")))
        ratio = tl.exp2(-tl.abs(x - best) * heat_log2)    # of the smaller weight to the larger
        total = tl.where(larger, total * ratio + 1.0, total + ratio)
        best_token = tl.where(larger, start + lane, best_token)
        best = tl.where(larger, x, best)
    top = tl.max(best, 0)
    total = tl.sum(total * tl.exp2((best - top) * heat_log2), 0)
    token = tl.min(tl.where(best == top, best_token, num_tokens), 0)
    finite = (tl.max(broken, 0) == 0) & (total > 0.0)

    if finite & (greedy == 0):
        threshold = tl.full((), -float("inf"), tl.float32)
        if (top_k > 0) & (top_k < num_tokens):
            threshold = _threshold(
                row_ptr, num_tokens, threshold, top, top_k.to(tl.float32), top, heat_log2, False, BLOCK
            )
        if (top_p > 0.0) & (top_p < 1.0):
            kept = tl.zeros([BLOCK], tl.float32)
            for start in range(0, num_tokens, BLOCK):
                kept += _kept_weights(row_ptr, start, num_tokens, threshold, top, heat_log2, BLOCK)
            threshold = _threshold(
                row_ptr, num_tokens, threshold, top, top_p * tl.sum(kept, 0), top, heat_log2, True, BLOCK
            )

        if min_p > 0.0:
            threshold = tl.maximum(threshold, top + temperature * tl.log2(min_p) * LN_2)

        mass = 0.0                                        # the kept blocks, summed in the order they are walked below
        for start in range(0, num_tokens, BLOCK):
            mass += tl.sum(_kept_weights(row_ptr, start, num_tokens, threshold, top, heat_log2, BLOCK), 0)
        uniform = philox_uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        target = uniform * mass

        before = 0.0                                      # mass of the blocks before `begin`
        begin = 0
        block_mass = tl.sum(_kept_weights(row_ptr, 0, num_tokens, threshold, top, heat_log2, BLOCK), 0)
        while (before + block_mass <= target) & (begin + BLOCK < num_tokens):
            before += block_mass
            begin += BLOCK
            block_mass = tl.sum(_kept_weights(row_ptr, begin, num_tokens, threshold, top, heat_log2, BLOCK), 0)
        weights = _kept_weights(row_ptr, begin, num_tokens, threshold, top, heat_log2, BLOCK)
        exceeds = (before + tl.cumsum(weights, 0) > target) & (weights > 0.0)
        drawn = tl.min(tl.where(exceeds, begin + lane, num_tokens), 0)
        last_kept = tl.max(tl.where(weights > 0.0, begin + lane, -1), 0)
        drawn = tl.where(drawn < num_tokens, drawn, last_kept)            # the scan rounds otherwise than the sum
        token = tl.where(drawn >= 0, drawn, token)

    token = tl.where(finite, token, 0)
    chosen = tl.load(row_ptr + token).to(tl.float32)
    log_prob = ((chosen - top) * heat_log2 - tl.log2(total)) * LN_2
    tl.store(token_ptr + row, token.to(token_ptr.dtype.element_ty))
    tl.store(log_prob_ptr + row, tl.where(finite, log_prob, float("nan")))
    tl.store(finite_ptr + row, finite.to(finite_ptr.dtype.element_ty))


def sample_token(
    logits, temperature, top_k, top_p, seed, position, tokens=None, log_probs=None, finite=None, min_p=None,
    wants_log_prob=None,
):
    """One token per row; see the module's docstring for shapes. Returns (tokens, log_probs, finite).

    A log-prob costs nothing beside the token, so each row has one, whatever wants_log_prob says.
    """
    num_rows, vocabulary = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device) if tokens is None else tokens
    log_probs = torch.empty(num_rows, dtype=torch.float32, device=logits.device) if log_probs is None else log_probs
    finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device) if finite is None else finite
    min_p = torch.zeros(num_rows, dtype=torch.float32, device=logits.device) if min_p is None else min_p
    assert logits.stride(1) == 1
    if num_rows == 0:
        return tokens, log_probs, finite

    _sample_kernel[(num_rows,)](
        logits, temperature, top_k, top_p, min_p, seed, position, tokens, log_probs, finite,
        vocabulary, logits.stride(0),
        BLOCK=min(MAX_BLOCK, triton.next_power_of_2(vocabulary)),
        num_warps=8,
    )
    return tokens, log_probs, finite
