"""Sample one token per row of logits.

    x    = logits / temperature,  p = softmax(x)
    keep = the tokens that pass three filters in turn:
           top_k: the top_k largest logits, with all ties of the last
           top_p: by descending renormalized probability, the tokens up to the one at which the sum reaches top_p, with
                  all ties of the last
           min_p: the logits >= max(logits) + temperature * log(min_p)
    block    = of the blocks of 64 consecutive ids, the one with the largest log(sum of its kept p) + G(BLOCKS, block)
    token    = of the kept ids in that block, the one with the largest log(p) + G(TOKENS, id mod 64)
    log_prob = log p[token], without any filter

G(purpose, number) = -log(-log(u)), with u = uniform(seed, position, purpose, number) from `philox`. So a token is drawn
with its kept probability (Gumbel's rule, twice), and draws with the same seed and position from close distributions
mostly give the same token. Of equal values, the lower id counts.

Shapes      logits                   [R, V]   any float dtype, R rows of V tokens, contiguous rows, any row stride;
                                     -inf = forbidden token
            temperature              [R] float32   0: greedy, with the log-prob at temperature 1
            top_k                    [R] int32   0: off
            top_p                    [R] float32   off if >= 1, or if 0 in a row with top_k > 0
            min_p                    [R] float32   0 or None: off
            seed                     [R] int64   the bits of the request's unsigned seed
            position                 [R] int32   position of the sampled token in its sequence
            tokens                   [R] int32 or any integer dtype   None: allocated
            log_probs                [R] float32   None: allocated
            finite                   [R] bool or any integer dtype   None: allocated. The caller can pass tokens,
                                     log_probs and finite, so that a captured graph writes to fixed addresses
            wants_log_prob           [R] bool on the host   rows that need a log-prob; in other rows it is arbitrary.
                                     None: all
            only_greedy              True: the caller guarantees that every row is greedy
            slots                    [R] int64   index of each row in temperature, top_k, top_p, min_p, seed and end_id,
                                     which then are [S]. None: row r has index r
            end_id                   [R] int32   the token that ends the sequence; -1: none. None if finish is None
            finish                   [R] any integer dtype   1 if the token is the end_id, else 0; can be None
            last_tokens              [S, C] int64, contiguous, C a power of two   stores the tokens, at
                                     [slots, position mod C]; can be None
            counts                   [R, BUCKETS] int32, zeros   scratch memory. None: allocated
Greedy      temperature == 0, or top_k == 1, or top_k == 0 and top_p == 0: the largest logit; ties: the lowest id.
Mutates     tokens, log_probs, finite, finish, last_tokens, counts. finite is False for a row with NaN or +inf, or only
            -inf; its token is then 0 and its log-prob NaN.
Oracle      triton_kernels/reference/sample_token.py
Source      Gumbel's rule on two levels; thresholds by radix selection instead of a sort; written for this project.
            Shared random numbers: Daliri, Musco and Suresh, arXiv 2408.07978

All kernels but the last run one program per row and piece of the vocabulary, so that few rows also fill the device:

    piece     find the maximum of each piece, its id and the sum of weights exp((logit - maximum) / temperature); for
              top-k, count the logits by their first digit
    digit     find the thresholds of top-k, then of top-p, digit by digit. Logits are mapped to integers of the same
              order. A digit has 11 bits, the third 10: two digits cover a 16-bit logit, three a float32. There is
              one pass for each filter and each digit after the first. The pass takes the logits that share the digits
              of the threshold so far, and counts and weighs them by the next digit. The first of these passes also
              weighs the logits by their first digit, for top-p: with top-k, those above the first digit of its
              threshold; otherwise those that top-p can keep, and all others as one sum. Weights are integers, in units
              of 2^-40 of the largest, so that their sums do not depend on the order. Most logits have few first
              digits; a program sums the weights of a frequent digit before it adds them to those of other programs
    block     find the block with the largest sum in each piece: log(sum of its kept weights) + G
    token     one program per row: find the piece with the largest of them, then the token in its block; set the results

The result of a row depends on that row alone. The launches of the kernels depend only on the dtype and on
`only_greedy`. If `only_greedy` is true, only the kernels piece and token are launched. Otherwise there are 5
launches for 16-bit logits and 7 for float32, one more to allocate `counts` if it is None, and one more to allocate
`min_p` if it is None. Programs of rows that do not need a pass exit immediately.
"""

import torch
import triton
import triton.language as tl

from .device_limits import device_limits
from .philox import philox_gumbel
from .sample_scratch import BUCKETS as NUM_BUCKETS
from .sample_scratch import MAX_BLOCK, MAX_PIECE, num_digits, num_histograms

BUCKETS = tl.constexpr(NUM_BUCKETS)
LAST_BUCKETS = tl.constexpr(1024)       # values of the third digit
FIRST_SHIFT = tl.constexpr(21)          # number of bits below the first digit
SECOND_SHIFT = tl.constexpr(10)         # number of bits below the second digit
TOP_K = tl.constexpr(0)
TOP_P = tl.constexpr(1)
KEEPS_ALL = tl.constexpr(-1)            # in place of digits: the row has fewer logits above -inf than top_k
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
UNIT = tl.constexpr(1099511627776.0)    # 2^40
BLOCKS, TOKENS = tl.constexpr(1), tl.constexpr(2)       # purposes of random numbers
NO_BLOCK = tl.constexpr(2147483647)
FREQUENT = tl.constexpr(64)             # number of weights of a bucket from which on a program sums them itself


@triton.jit
def _load_part(row_ptr, part, num_tokens, SIZE: tl.constexpr):
    """Load part number `part`, of SIZE logits, of a row as float32; -inf past the end of the row."""
    token = part * SIZE + tl.arange(0, SIZE)
    return tl.load(row_ptr + token, mask=token < num_tokens, other=-float("inf")).to(tl.float32)


@triton.jit
def _inverse_log2(temperature):
    """Return log2(e) / temperature, for exponentials of base 2; temperature 0 counts as 1.

    The result is limited to 1e38: infinity times a logit difference of 0 would be NaN.
    """
    divisor = tl.where(temperature == 0.0, 1.0, temperature)
    return tl.minimum(LOG2_E / divisor, 1e38)


@triton.jit
def _is_greedy(temperature, top_k, top_p):
    return (temperature == 0.0) | (top_k == 1) | ((top_k == 0) & (top_p == 0.0))


@triton.jit
def _top_of(best_ptr, total_ptr, row, num_pieces, inverse_log2, PIECES: tl.constexpr):
    """Return (largest logit of a row, sum of exp((logit - largest) / temperature) over the row).

    The sum is NaN or 0 if the row has NaN or +inf, or only -inf.
    """
    piece = tl.arange(0, PIECES)
    best = tl.load(best_ptr + row * num_pieces + piece, mask=piece < num_pieces, other=LOWEST)
    total = tl.load(total_ptr + row * num_pieces + piece, mask=piece < num_pieces, other=0.0)
    top = tl.max(best, 0)
    return top, tl.sum(total * tl.exp2((best - top) * inverse_log2), 0)


@triton.jit
def _order_of(x):
    """Map float32 to integers 0 .. 2^32 - 1, as int64, in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _float_of(order):
    """Return the float32 that `_order_of` maps to the integer `order`."""
    bits = (order - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _has_top_k(top_k, num_tokens):
    return (top_k > 0) & (top_k < num_tokens)


@triton.jit
def _has_top_p(top_p):
    return (top_p > 0.0) & (top_p < 1.0)


@triton.jit
def _slot(slot_ptr, row):
    """Return the index of a row in the tensors of sampling parameters."""
    slot = row
    if slot_ptr is not None:
        slot = tl.load(slot_ptr + row)
    return slot


# A row has histograms [3 * DIGITS - 2, BUCKETS] int64, of the logits that share the digits of a threshold so far:
#     counts for top-k, by digit 1 ..; weights of the same logits, by digit 1 ..; weights for top-p, by digit 0, 1 ..
@triton.jit
def _histogram_index(filter, digit, DIGITS: tl.constexpr):
    """Return the index of the histogram that determines digit number `digit` of a threshold.

    filter   the filter that the threshold belongs to: TOP_K or TOP_P
    """
    return tl.where(filter == TOP_K, digit - 1, 2 * DIGITS - 2 + digit)


@triton.jit
def _histogram(histogram_ptr, row, which, DIGITS: tl.constexpr):
    return tl.load(histogram_ptr + (row * (3 * DIGITS - 2) + which) * BUCKETS + tl.arange(0, BUCKETS))


@triton.jit
def _next_digit(histogram, digits, missing, VALUES: tl.constexpr):
    """Find the next digit of a threshold. Returns (digits with the next one appended, new `missing`).

    If the sum of the histogram is less than `missing`, the returned digits are KEEPS_ALL.

    histogram  for each value of the next digit, the count or weight of the logits that begin with `digits` and
               this value
    digits     digits of the threshold so far; 0 before the first
    missing    count or weight that the filter still has to keep, from the logits that begin with `digits`
    VALUES     number of values of the next digit
    """
    digit = tl.arange(0, BUCKETS)
    reached = tl.sum(histogram, 0) - tl.cumsum(histogram, 0) + histogram   # by this digit and all larger ones
    found = tl.max(tl.where(reached >= missing, digit, -1), 0)
    above = tl.sum(tl.where(digit > found, histogram, 0), 0)
    return tl.where(found < 0, KEEPS_ALL, digits * VALUES + found), missing - above


@triton.jit
def _all_digits(histogram_ptr, digits_ptr, missing_ptr, row, filter, DIGITS: tl.constexpr):
    """Return all digits of a threshold. Finds the last digit; the digits before it must be stored already.

    filter   the filter that the threshold belongs to: TOP_K or TOP_P
    """
    index = (row * 2 + filter) * DIGITS + DIGITS - 2
    digits = tl.load(digits_ptr + index)
    if digits != KEEPS_ALL:
        histogram = _histogram(histogram_ptr, row, _histogram_index(filter, DIGITS - 1, DIGITS), DIGITS)
        if DIGITS == 2:
            digits, _ = _next_digit(histogram, digits, tl.load(missing_ptr + index), BUCKETS)
        else:
            digits, _ = _next_digit(histogram, digits, tl.load(missing_ptr + index), LAST_BUCKETS)
    return digits


@triton.jit
def _threshold_of(digits, DIGITS: tl.constexpr):
    order = digits
    if DIGITS == 2:
        order = digits << SECOND_SHIFT
    return tl.where(digits == KEEPS_ALL, -float("inf"), _float_of(tl.where(digits == KEEPS_ALL, 0, order)))


@triton.jit
def _kept_by_top_k(histogram_ptr, row, digits, DIGITS: tl.constexpr):
    """Return [BUCKETS] int64: the weights of the logits that top-k keeps, summed by the first digit of the logit.

    The module docstring explains weights and digits.

    digits   all digits of top-k's threshold
    """
    weights = _histogram(histogram_ptr, row, 2 * DIGITS - 2, DIGITS)
    if digits != KEEPS_ALL:
        bucket = tl.arange(0, BUCKETS)
        if DIGITS == 2:
            first, last = digits >> 11, digits & (BUCKETS - 1)
            kept = tl.sum(tl.where(bucket >= last, _histogram(histogram_ptr, row, 1, DIGITS), 0), 0)
        else:
            first, second, last = digits >> 21, (digits >> 10) & (BUCKETS - 1), digits & (LAST_BUCKETS - 1)
            kept = tl.sum(tl.where(bucket > second, _histogram(histogram_ptr, row, 2, DIGITS), 0), 0)
            kept += tl.sum(tl.where(bucket >= last, _histogram(histogram_ptr, row, 3, DIGITS), 0), 0)
        weights = tl.where(bucket > first, weights, tl.where(bucket == first, kept, 0))
    return weights


@triton.jit
def _add_weights(histogram_ptr, bucket, weight, adds):
    """Add weights to a histogram in global memory.

    Additions to one address run one after another. The program therefore sums the weights of a bucket that has at
    least FREQUENT of them, and adds the sum.

    bucket, weight, adds   bucket and weight of each logit, and whether to add it
    """
    buckets = tl.arange(0, BUCKETS)
    count = tl.histogram(bucket, BUCKETS, mask=adds)
    most = tl.max(count, 0)
    while most >= FREQUENT:
        frequent = tl.min(tl.where(count == most, buckets, BUCKETS), 0)
        tl.atomic_add(histogram_ptr + frequent, tl.sum(tl.where(adds & (bucket == frequent), weight, 0), 0),
                      sem="relaxed")
        adds = adds & (bucket != frequent)
        count = tl.where(buckets == frequent, 0, count)
        most = tl.max(count, 0)
    tl.atomic_add(histogram_ptr + bucket, weight, mask=adds, sem="relaxed")


# Slices of the per-row tensors start anywhere: their alignment must not recompile the kernel.
@triton.jit(do_not_specialize_on_alignment=["slot_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "count_ptr"])
def _sample_piece_kernel(
    logits_ptr, slot_ptr, temperature_ptr, top_k_ptr, top_p_ptr, best_ptr, best_token_ptr, total_ptr,
    count_ptr,                          # [R, BUCKETS] int32, zero on entry; used for rows with a filter
    histogram_ptr,                      # [R, 3 * DIGITS - 2, BUCKETS] int64, set to zero; used for rows with a filter
    num_tokens,                         # V
    logits_stride_r,                    # elements from one row to the next
    DIGITS: tl.constexpr, PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    slot = _slot(slot_ptr, row)
    x = _load_part(logits_ptr + row * logits_stride_r, piece, num_tokens, PIECE)
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    has_top_k = _has_top_k(top_k, num_tokens)
    if (has_top_k | _has_top_p(top_p)) & (_is_greedy(temperature, top_k, top_p) == 0):
        for which in range(piece, 3 * DIGITS - 2, tl.num_programs(1)):
            entries = (row * (3 * DIGITS - 2) + which) * BUCKETS + tl.arange(0, BUCKETS)
            tl.store(histogram_ptr + entries, tl.zeros([BUCKETS], tl.int64))
        if has_top_k:
            bucket = (_order_of(x) >> FIRST_SHIFT).to(tl.int32)
            count = tl.histogram(bucket, BUCKETS, mask=x > -float("inf"))
            lane = row * BUCKETS + tl.arange(0, BUCKETS)
            tl.atomic_add(count_ptr + lane, count, mask=count > 0, sem="relaxed")

    inverse_log2 = _inverse_log2(temperature)
    is_broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    x = tl.where((x != x) | (x == float("inf")), -float("inf"), x)
    best = tl.maximum(tl.max(x, 0), LOWEST)               # not -inf: -inf minus -inf is NaN
    total = tl.sum(tl.exp2((x - best) * inverse_log2), 0)
    token = tl.min(tl.where(x == best, piece * PIECE + tl.arange(0, PIECE), num_tokens), 0)
    index = row * tl.num_programs(1) + piece
    tl.store(best_ptr + index, best)
    tl.store(best_token_ptr + index, token)
    tl.store(total_ptr + index, tl.where(is_broken > 0, float("nan"), total))


@triton.jit(
    do_not_specialize=["filter", "digit"],
    do_not_specialize_on_alignment=["slot_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "count_ptr"],
)
def _sample_digit_kernel(
    logits_ptr, slot_ptr, temperature_ptr, top_k_ptr, top_p_ptr, best_ptr, total_ptr, count_ptr, histogram_ptr,
    digits_ptr, missing_ptr,            # [R, 2, DIGITS] int64
    threshold_ptr,                      # [R] float32: threshold of top-k
    filter, digit,                      # TOP_K, then TOP_P; the digit to count and weigh by, 1 .. DIGITS - 1
    num_tokens, logits_stride_r,
    DIGITS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    slot = _slot(slot_ptr, row)
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    has_top_k, has_top_p = _has_top_k(top_k, num_tokens), _has_top_p(top_p)
    weighs_all = has_top_p & (filter == TOP_K) & (digit == 1)
    is_filtered = tl.where(filter == TOP_K, has_top_k | weighs_all, has_top_p)
    if (is_filtered == 0) | _is_greedy(temperature, top_k, top_p):
        return

    # All programs of a row compute these values; the first stores them for later launches.
    threshold = tl.full((), -float("inf"), tl.float32)    # of top-k, for top-p
    digits = tl.full((), KEEPS_ALL, tl.int64)
    missing = tl.full((), 0, tl.int64)
    index = (row * 2 + filter) * DIGITS + digit - 1
    if filter == TOP_P:
        if digit == 1:
            all_digits = tl.full((), KEEPS_ALL, tl.int64)
            if has_top_k:
                all_digits = _all_digits(histogram_ptr, digits_ptr, missing_ptr, row, TOP_K, DIGITS)
            threshold = _threshold_of(all_digits, DIGITS)
            kept = _kept_by_top_k(histogram_ptr, row, all_digits, DIGITS)
            share = tl.ceil(tl.sum(kept, 0).to(tl.float64) * top_p.to(tl.float64)).to(tl.int64)
            digits, missing = _next_digit(kept, tl.full((), 0, tl.int64), share, BUCKETS)
            if piece == 0:
                tl.store(threshold_ptr + row, threshold)
        else:
            threshold = tl.load(threshold_ptr + row)
    elif has_top_k & (digit == 1):
        count = tl.load(count_ptr + row * BUCKETS + tl.arange(0, BUCKETS)).to(tl.int64)
        digits, missing = _next_digit(count, tl.full((), 0, tl.int64), top_k.to(tl.int64), BUCKETS)
    if (digit > 1) & is_filtered:
        digits = tl.load(digits_ptr + index - 1)
        missing = tl.load(missing_ptr + index - 1)
        if digits != KEEPS_ALL:
            histogram = _histogram(histogram_ptr, row, _histogram_index(filter, digit - 1, DIGITS), DIGITS)
            digits, missing = _next_digit(histogram, digits, missing, BUCKETS)
    if piece == 0:
        tl.store(digits_ptr + index, digits)
        tl.store(missing_ptr + index, missing)

    x = _load_part(logits_ptr + row * logits_stride_r, piece, num_tokens, PIECE)
    order = _order_of(x).to(tl.uint32)                    # fewer registers
    shift = tl.where(digit == 1, SECOND_SHIFT, 0)
    shift_before = tl.where(digit == 1, FIRST_SHIFT, SECOND_SHIFT)
    # No logit starts with the digits KEEPS_ALL.
    counts = (x > -float("inf")) & (x >= threshold) & ((order >> shift_before).to(tl.int32) == digits.to(tl.int32))
    bucket = (order >> shift).to(tl.int32) & (tl.where(digit == 1, BUCKETS, LAST_BUCKETS) - 1)
    histogram_ptr += row * (3 * DIGITS - 2) * BUCKETS
    if (filter == TOP_K) & has_top_k:
        count = tl.histogram(bucket, BUCKETS, mask=counts).to(tl.int64)
        lane = (digit - 1) * BUCKETS + tl.arange(0, BUCKETS)
        tl.atomic_add(histogram_ptr + lane, count, mask=count > 0, sem="relaxed")
    if has_top_p:
        inverse_log2 = _inverse_log2(temperature)
        top, total = _top_of(best_ptr, total_ptr, row, tl.num_programs(1), inverse_log2, PIECES)
        weight = tl.exp2((x - top) * inverse_log2) * UNIT
        weight = tl.where(total > 0.0, weight, 0.0).to(tl.int64)           # no weights in rows that are not finite
        which = tl.where(filter == TOP_K, DIGITS - 2 + digit, 2 * DIGITS - 2 + digit)
        _add_weights(histogram_ptr + which * BUCKETS, bucket, weight, counts & (weight > 0))
        if weighs_all:
            histogram_ptr += (2 * DIGITS - 2) * BUCKETS
            least = tl.full((), 1, tl.int64)
            if has_top_k == 0:
                # Top-p keeps no logit of less than half the weight with which all logits would weigh 1 - top_p of the
                # total: the others weigh more than top_p. Bucket 0, which no number has, gets the sum of these weights.
                share = tl.where(total > 0.0, (1.0 - top_p) * total / num_tokens, 0.0)
                least = tl.maximum((share * (0.5 * UNIT)).to(tl.int64), 1)
                rest = tl.sum(tl.where(weight < least, weight, 0), 0)
                tl.atomic_add(histogram_ptr, rest, mask=rest > 0, sem="relaxed")
            # With top-k, the weights up to the first digit of its threshold are not read; see _kept_by_top_k.
            first = (order >> FIRST_SHIFT).to(tl.int32)
            _add_weights(histogram_ptr, first, weight, (weight >= least) & (first > digits))


@triton.jit(
    do_not_specialize_on_alignment=[
        "slot_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr", "seed_ptr", "position_ptr",
    ],
)
def _sample_block_kernel(
    logits_ptr, slot_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr, best_ptr, total_ptr,
    histogram_ptr, digits_ptr, missing_ptr,
    threshold_ptr,                      # [R] float32: threshold of all filters together
    score_ptr, drawn_ptr,               # [R, pieces] float32 and int32: largest sum with G, and the block's number
    num_tokens, logits_stride_r,
    DIGITS: tl.constexpr, PIECES: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    num_pieces = tl.num_programs(1)
    slot = _slot(slot_ptr, row)
    temperature = tl.load(temperature_ptr + slot)
    top_k = tl.load(top_k_ptr + slot)
    top_p = tl.load(top_p_ptr + slot)
    min_p = tl.load(min_p_ptr + slot)
    if _is_greedy(temperature, top_k, top_p):
        return
    inverse_log2 = _inverse_log2(temperature)
    top, _ = _top_of(best_ptr, total_ptr, row, num_pieces, inverse_log2, PIECES)
    threshold = tl.full((), -float("inf"), tl.float32)
    has_top_p = _has_top_p(top_p)                         # if so, its threshold includes that of top-k
    if has_top_p | _has_top_k(top_k, num_tokens):
        last_filter = tl.where(has_top_p, TOP_P, TOP_K)
        threshold = _threshold_of(_all_digits(histogram_ptr, digits_ptr, missing_ptr, row, last_filter, DIGITS), DIGITS)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, top + temperature * tl.log2(min_p) * LN_2)
    x = _load_part(logits_ptr + row * logits_stride_r, piece, num_tokens, PIECE)
    weights = tl.where(x >= threshold, tl.exp2((x - top) * inverse_log2), 0.0)
    weights = tl.sum(tl.reshape(weights, [PIECE // BLOCK, BLOCK]), 1)
    block = piece * (PIECE // BLOCK) + tl.arange(0, PIECE // BLOCK)
    score = tl.log(weights) + philox_gumbel(tl.load(seed_ptr + slot), tl.load(position_ptr + row), BLOCKS, block)
    largest = tl.max(score, 0)
    tl.store(score_ptr + row * num_pieces + piece, largest)
    tl.store(drawn_ptr + row * num_pieces + piece, tl.min(tl.where(score == largest, block, NO_BLOCK), 0))
    if piece == 0:
        tl.store(threshold_ptr + row, threshold)


@triton.jit(
    do_not_specialize=["num_pieces"],
    do_not_specialize_on_alignment=[
        "slot_ptr", "temperature_ptr", "top_k_ptr", "top_p_ptr", "seed_ptr", "position_ptr", "end_id_ptr", "token_ptr",
        "log_prob_ptr", "finite_ptr", "finish_ptr",
    ],
)
def _sample_token_kernel(
    logits_ptr, slot_ptr, temperature_ptr, top_k_ptr, top_p_ptr, seed_ptr, position_ptr, end_id_ptr,
    best_ptr, best_token_ptr, total_ptr, threshold_ptr, score_ptr, drawn_ptr,
    token_ptr, log_prob_ptr, finite_ptr, finish_ptr, last_token_ptr,
    num_tokens, logits_stride_r, num_pieces,
    COLUMNS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = _slot(slot_ptr, row)
    row_ptr = logits_ptr + row * logits_stride_r
    temperature = tl.load(temperature_ptr + slot)
    position = tl.load(position_ptr + row)
    inverse_log2 = _inverse_log2(temperature)
    top, total = _top_of(best_ptr, total_ptr, row, num_pieces, inverse_log2, PIECES)
    finite = total > 0.0                                  # False for NaN
    piece = tl.arange(0, PIECES)
    piece_index = row * num_pieces + piece
    best = tl.load(best_ptr + piece_index, mask=piece < num_pieces, other=-float("inf"))
    best_token = tl.load(best_token_ptr + piece_index, mask=piece < num_pieces, other=num_tokens)
    token = tl.min(tl.where(best == top, best_token, num_tokens), 0)

    is_greedy = _is_greedy(temperature, tl.load(top_k_ptr + slot), tl.load(top_p_ptr + slot))
    if finite & (is_greedy == 0):
        scores = tl.load(score_ptr + piece_index, mask=piece < num_pieces, other=-float("inf"))
        drawn = tl.load(drawn_ptr + piece_index, mask=piece < num_pieces, other=NO_BLOCK)
        block = tl.min(tl.where(scores == tl.max(scores, 0), drawn, NO_BLOCK), 0)
        lane = tl.arange(0, BLOCK)
        x = _load_part(row_ptr, block, num_tokens, BLOCK)
        scores = tl.where(x >= tl.load(threshold_ptr + row), (x - top) * inverse_log2 * LN_2, -float("inf"))
        scores += philox_gumbel(tl.load(seed_ptr + slot), position, TOKENS, lane)
        sampled = block * BLOCK + tl.min(tl.where(scores == tl.max(scores, 0), lane, BLOCK), 0)
        token = tl.where(sampled < num_tokens, sampled, token)
    token = tl.where(finite, token, 0)
    chosen_logit = tl.load(row_ptr + token).to(tl.float32)
    log_prob = ((chosen_logit - top) * inverse_log2 - tl.log2(total)) * LN_2
    tl.store(token_ptr + row, token.to(token_ptr.dtype.element_ty))
    tl.store(log_prob_ptr + row, tl.where(finite, log_prob, float("nan")))
    tl.store(finite_ptr + row, finite.to(finite_ptr.dtype.element_ty))
    if finish_ptr is not None:
        ends = token == tl.load(end_id_ptr + slot)
        tl.store(finish_ptr + row, ends.to(finish_ptr.dtype.element_ty))
    if last_token_ptr is not None:
        tl.store(last_token_ptr + slot * COLUMNS + (position & (COLUMNS - 1)), token.to(tl.int64))


def sample_token(
    logits, temperature, top_k, top_p, seed, position, tokens=None, log_probs=None, finite=None, min_p=None,
    wants_log_prob=None, only_greedy=False, slots=None, end_id=None, finish=None, last_tokens=None, counts=None,
):
    """Sample one token per row. Returns (tokens, log_probs, finite). See the module docstring for shapes.

    Ignores wants_log_prob, because a log-prob for every row costs nothing extra.
    """
    num_rows, vocabulary = logits.shape

    def allocate(*shape, dtype=torch.float32, make=torch.empty):
        return make(num_rows, *shape, dtype=dtype, device=logits.device)

    tokens = allocate(dtype=torch.int32) if tokens is None else tokens
    log_probs = allocate() if log_probs is None else log_probs
    finite = allocate(dtype=torch.bool) if finite is None else finite
    assert logits.stride(1) == 1 and (last_tokens is None or last_tokens.is_contiguous())
    if num_rows == 0:
        return tokens, log_probs, finite

    piece = min(MAX_PIECE, triton.next_power_of_2(vocabulary))
    block = min(MAX_BLOCK, piece)
    num_pieces = triton.cdiv(vocabulary, piece)
    grid = num_rows, num_pieces
    sizes = vocabulary, logits.stride(0)
    digits = num_digits(logits.element_size())
    settings = dict(PIECES=triton.next_power_of_2(num_pieces))
    columns = 1 if last_tokens is None else last_tokens.shape[1]
    best, total, best_token = allocate(num_pieces), allocate(num_pieces), allocate(num_pieces, dtype=torch.int32)
    threshold, score, drawn = allocate(), allocate(num_pieces), allocate(num_pieces, dtype=torch.int32)
    parameters = slots, temperature, top_k, top_p
    if only_greedy:                     # counts and histograms are unused; None would compile another variant
        counts, histograms = best_token, allocate(0, dtype=torch.int64)
    else:
        counts = allocate(NUM_BUCKETS, dtype=torch.int32, make=torch.zeros) if counts is None else counts
        histograms = allocate(num_histograms(digits), NUM_BUCKETS, dtype=torch.int64)
    _sample_piece_kernel[grid](
        logits, *parameters, best, best_token, total, counts, histograms, *sizes,
        DIGITS=digits, PIECE=piece, num_warps=4,
    )
    if not only_greedy:
        min_p = torch.zeros_like(top_p) if min_p is None else min_p
        known, missing = allocate(2, digits, dtype=torch.int64), allocate(2, digits, dtype=torch.int64)
        warps = 16 if device_limits().rows_pass_shared else 8     # 16 have too few registers on AMD GPUs
        for filter in (TOP_K.value, TOP_P.value):
            for digit in range(1, digits):
                _sample_digit_kernel[grid](
                    logits, *parameters, best, total, counts, histograms, known, missing, threshold, filter, digit,
                    *sizes, DIGITS=digits, PIECE=piece, num_warps=warps, **settings,
                )
        _sample_block_kernel[grid](
            logits, *parameters, min_p, seed, position, best, total, histograms, known, missing, threshold, score,
            drawn, *sizes, DIGITS=digits, PIECE=piece, BLOCK=block, num_warps=4, **settings,
        )
    _sample_token_kernel[(num_rows,)](
        logits, *parameters, seed, position, end_id, best, best_token, total, threshold, score, drawn, tokens,
        log_probs, finite, finish, last_tokens, *sizes, num_pieces, COLUMNS=columns, BLOCK=block, num_warps=4,
        **settings,
    )
    return tokens, log_probs, finite
