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
            only_greedy              True: the caller knows that every row is greedy
Greedy      temperature == 0, or top_k == 1, or top_k == 0 and top_p == 0: the largest logit, the lowest id among
            equals.
Mutates     tokens, log_probs, finite. finite is False where a row holds NaN or +inf or nothing but -inf; the token is
            then 0 and the log-prob NaN.
Oracle      triton_kernels/reference/sample_token.py
Source      inverse transform sampling; the thresholds by radix selection instead of a sort; written for this project.

A program is a row and a piece of the vocabulary, so that a few rows occupy a device as many do:

    pieces    the maximum of each piece, its id, the sum of weights
    digits    the thresholds of top-k, then of top-p, digit by digit. A digit is 11 bits of the integer that orders like
              a logit, or the last 10: two have all of a 16-bit logit, three of a float32. For each, the logits that
              agree with the threshold so far are counted, or weighed, by their next digit. Weights are integers, in
              units of 2^-40 of the largest: their sums are the same in any order
    masses    what is kept of each piece
    draw      one program a row: the piece that u falls into, then the token

A row's result depends on nothing but that row. What is launched depends on the dtype alone, and on `only_greedy`: then
it is pieces and draw. Programs of a row that does not need them end at once.
"""

import torch
import triton
import triton.language as tl

from .philox import philox_uniform

MAX_BLOCK = 4096                        # logits of a piece
BUCKETS = tl.constexpr(2048)            # values of a digit
LAST_BUCKETS = tl.constexpr(1024)       # of the last of three
FIRST_SHIFT = tl.constexpr(21)          # bits behind each digit
SECOND_SHIFT = tl.constexpr(10)
TOP_K = tl.constexpr(0)
TOP_P = tl.constexpr(1)
KEEPS_ALL = tl.constexpr(-1)            # instead of digits: the row has fewer logits above -inf than top_k
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-3.4028234663852886e38)
UNIT = tl.constexpr(1099511627776.0)    # 2^40


@triton.jit
def _load_piece(row_ptr, piece, num_tokens, BLOCK: tl.constexpr):
    """Logits of a piece in float32, -inf past the end."""
    token = piece * BLOCK + tl.arange(0, BLOCK)
    return tl.load(row_ptr + token, mask=token < num_tokens, other=-float("inf")).to(tl.float32)


@triton.jit
def _heat_log2(temperature):
    """What a difference of logits is multiplied by in the exponent of two."""
    heat = tl.where(temperature == 0.0, 1.0, temperature)
    return tl.minimum(LOG2_E / heat, 1e38)                # 0 * inf is NaN: stay finite


@triton.jit
def _is_greedy(temperature, top_k, top_p):
    return (temperature == 0.0) | (top_k == 1) | ((top_k == 0) & (top_p == 0.0))


@triton.jit
def _top_of(best_ptr, total_ptr, row, num_pieces, heat_log2, PIECES: tl.constexpr):
    """(largest logit of a row, sum of its weights). The sum is NaN, or 0, where the row is not finite."""
    piece = tl.arange(0, PIECES)
    best = tl.load(best_ptr + row * num_pieces + piece, mask=piece < num_pieces, other=LOWEST)
    total = tl.load(total_ptr + row * num_pieces + piece, mask=piece < num_pieces, other=0.0)
    top = tl.max(best, 0)
    return top, tl.sum(total * tl.exp2((best - top) * heat_log2), 0)


@triton.jit
def _order_of(x):
    """The integer 0 .. 2^32 - 1, as int64, that orders like the float32 `x`."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) + 2147483648


@triton.jit
def _float_of(order):
    """Inverse of `_order_of`."""
    bits = (order - 2147483648).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _target(histogram_ptr, top_k, top_p, filter):
    """How much the logits at the threshold and above have to reach."""
    kept = tl.sum(tl.load(histogram_ptr + tl.arange(0, BUCKETS)), 0).to(tl.float64)
    share = tl.ceil(kept * top_p.to(tl.float64)).to(tl.int64)
    return tl.where(filter == TOP_K, top_k.to(tl.int64), share)


@triton.jit
def _next_digit(histogram_ptr, digits, missing, VALUES: tl.constexpr):
    """(digits and the next one, what is missing behind it), from the amounts by that digit.

    digits    of the threshold so far, 0 before the first
    missing   what the logits with these digits have to reach together
    VALUES    that the next digit may have
    """
    digit = tl.arange(0, BUCKETS)
    amount = tl.load(histogram_ptr + digit)
    reached = tl.sum(amount, 0) - tl.cumsum(amount, 0) + amount            # by this digit and all above it
    found = tl.max(tl.where(reached >= missing, digit, -1), 0)
    above = tl.sum(tl.where(digit > found, amount, 0), 0)
    return tl.where(found < 0, KEEPS_ALL, digits * VALUES + found), missing - above


@triton.jit
def _last_digit(histogram_ptr, digits_ptr, missing_ptr, row, filter, DIGITS: tl.constexpr):
    """The threshold of a filter, when all its digits are counted."""
    histogram_ptr += (row * 2 + filter) * DIGITS * BUCKETS
    place = (row * 2 + filter) * DIGITS + DIGITS - 2
    digits = tl.load(digits_ptr + place)
    threshold = tl.full((), -float("inf"), tl.float32)
    if digits != KEEPS_ALL:
        if DIGITS == 2:
            digits, _ = _next_digit(histogram_ptr + BUCKETS, digits, tl.load(missing_ptr + place), BUCKETS)
            threshold = _float_of(digits << SECOND_SHIFT)
        else:
            digits, _ = _next_digit(histogram_ptr + 2 * BUCKETS, digits, tl.load(missing_ptr + place), LAST_BUCKETS)
            threshold = _float_of(digits)
    return threshold


# Slices of the per-row tensors start anywhere: their alignment must not make a variant of the kernel.
@triton.jit(do_not_specialize_on_alignment=["temperature_ptr"])
def _sample_piece_kernel(
    logits_ptr, temperature_ptr, best_ptr, best_token_ptr, total_ptr,
    num_tokens,                         # V
    logits_stride_r,                    # elements from one row to the next
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    x = _load_piece(logits_ptr + row * logits_stride_r, piece, num_tokens, BLOCK)
    heat_log2 = _heat_log2(tl.load(temperature_ptr + row))
    is_broken = tl.max(((x != x) | (x == float("inf"))).to(tl.int32), 0)
    x = tl.where((x != x) | (x == float("inf")), -float("inf"), x)
    best = tl.maximum(tl.max(x, 0), LOWEST)               # not -inf: -inf minus -inf is NaN
    total = tl.sum(tl.exp2((x - best) * heat_log2), 0)
    token = tl.min(tl.where(x == best, piece * BLOCK + tl.arange(0, BLOCK), num_tokens), 0)
    place = row * tl.num_programs(1) + piece
    tl.store(best_ptr + place, best)
    tl.store(best_token_ptr + place, token)
    tl.store(total_ptr + place, tl.where(is_broken > 0, float("nan"), total))


@triton.jit(
    do_not_specialize=["filter", "digit"],
    do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr"],
)
def _sample_digit_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, best_ptr, total_ptr,
    histogram_ptr,                      # [R, 2, DIGITS, BUCKETS] int64, zeros before the first
    digits_ptr, missing_ptr,            # [R, 2, DIGITS] int64
    threshold_ptr,                      # [R] float32: that of top-k
    filter, digit,                      # TOP_K, then TOP_P; 0 .. DIGITS - 1
    num_tokens, logits_stride_r,
    DIGITS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    has_top_k = (top_k > 0) & (top_k < num_tokens)
    is_filtered = tl.where(filter == TOP_K, has_top_k, (top_p > 0.0) & (top_p < 1.0))
    if (is_filtered == 0) | _is_greedy(temperature, top_k, top_p):
        return

    # What all programs of a row compute alike, the first one keeps for later launches.
    threshold = tl.full((), -float("inf"), tl.float32)    # of top-k, for top-p
    if (filter == TOP_P) & has_top_k:
        if digit == 0:
            threshold = _last_digit(histogram_ptr, digits_ptr, missing_ptr, row, TOP_K, DIGITS)
            if piece == 0:
                tl.store(threshold_ptr + row, threshold)
        else:
            threshold = tl.load(threshold_ptr + row)
    histogram_ptr += (row * 2 + filter) * DIGITS * BUCKETS
    digits = tl.full((), 0, tl.int64)
    if digit > 0:
        place = (row * 2 + filter) * DIGITS + digit - 1
        if digit == 1:
            missing = _target(histogram_ptr, top_k, top_p, filter)
        else:
            digits = tl.load(digits_ptr + place - 1)
            missing = tl.load(missing_ptr + place - 1)
        if digits != KEEPS_ALL:
            digits, missing = _next_digit(histogram_ptr + (digit - 1) * BUCKETS, digits, missing, BUCKETS)
        if piece == 0:
            tl.store(digits_ptr + place, digits)
            tl.store(missing_ptr + place, missing)

    x = _load_piece(logits_ptr + row * logits_stride_r, piece, num_tokens, BLOCK)
    order = _order_of(x)
    shift = tl.where(digit == 0, FIRST_SHIFT, tl.where(digit == 1, SECOND_SHIFT, 0))
    shift_before = tl.where(digit == 0, 32, tl.where(digit == 1, FIRST_SHIFT, SECOND_SHIFT))
    # KEEPS_ALL is the beginning of no logit.
    counts = (x > -float("inf")) & (x >= threshold) & ((order >> shift_before) == digits)
    values = tl.where(digit == 2, LAST_BUCKETS, BUCKETS)
    bucket = ((order >> shift) & (values - 1)).to(tl.int32)
    histogram_ptr += digit * BUCKETS
    if filter == TOP_K:
        amount = tl.histogram(bucket, BUCKETS, mask=counts).to(tl.int64)
        tl.atomic_add(histogram_ptr + tl.arange(0, BUCKETS), amount, mask=amount > 0, sem="relaxed")
    else:
        heat_log2 = _heat_log2(temperature)
        top, total = _top_of(best_ptr, total_ptr, row, tl.num_programs(1), heat_log2, PIECES)
        weight = tl.exp2((x - top) * heat_log2) * UNIT
        weight = tl.where(total > 0.0, weight, 0.0).to(tl.int64)           # a row that is not finite has none
        tl.atomic_add(histogram_ptr + bucket, weight, mask=counts & (weight > 0), sem="relaxed")


@triton.jit(do_not_specialize_on_alignment=["temperature_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"])
def _sample_mass_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, best_ptr, total_ptr,
    histogram_ptr, digits_ptr, missing_ptr,
    threshold_ptr,                      # [R] float32: that of all filters
    mass_ptr,                           # [R, pieces] float32
    num_tokens, logits_stride_r,
    DIGITS: tl.constexpr, PIECES: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    num_pieces = tl.num_programs(1)
    temperature = tl.load(temperature_ptr + row)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)
    min_p = tl.load(min_p_ptr + row)
    if _is_greedy(temperature, top_k, top_p):
        return
    heat_log2 = _heat_log2(temperature)
    top, _ = _top_of(best_ptr, total_ptr, row, num_pieces, heat_log2, PIECES)
    threshold = tl.full((), -float("inf"), tl.float32)
    has_top_p = (top_p > 0.0) & (top_p < 1.0)             # what it keeps, top-k keeps
    if has_top_p | ((top_k > 0) & (top_k < num_tokens)):
        last_filter = tl.where(has_top_p, TOP_P, TOP_K)
        threshold = _last_digit(histogram_ptr, digits_ptr, missing_ptr, row, last_filter, DIGITS)
    if min_p > 0.0:
        threshold = tl.maximum(threshold, top + temperature * tl.log2(min_p) * LN_2)
    x = _load_piece(logits_ptr + row * logits_stride_r, piece, num_tokens, BLOCK)
    mass = tl.sum(tl.where(x >= threshold, tl.exp2((x - top) * heat_log2), 0.0), 0)
    tl.store(mass_ptr + row * num_pieces + piece, mass)
    if piece == 0:
        tl.store(threshold_ptr + row, threshold)


@triton.jit(
    do_not_specialize=["num_pieces"],
    do_not_specialize_on_alignment=[
        "temperature_ptr", "top_k_ptr", "top_p_ptr", "seed_ptr", "position_ptr", "token_ptr", "log_prob_ptr",
        "finite_ptr",
    ],
)
def _sample_draw_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, seed_ptr, position_ptr,
    best_ptr, best_token_ptr, total_ptr, threshold_ptr, mass_ptr,
    token_ptr, log_prob_ptr, finite_ptr,
    num_tokens, logits_stride_r, num_pieces,
    PIECES: tl.constexpr, BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * logits_stride_r
    temperature = tl.load(temperature_ptr + row)
    heat_log2 = _heat_log2(temperature)
    top, total = _top_of(best_ptr, total_ptr, row, num_pieces, heat_log2, PIECES)
    finite = total > 0.0                                  # NaN is not
    piece = tl.arange(0, PIECES)
    of_piece = row * num_pieces + piece
    best = tl.load(best_ptr + of_piece, mask=piece < num_pieces, other=-float("inf"))
    best_token = tl.load(best_token_ptr + of_piece, mask=piece < num_pieces, other=num_tokens)
    token = tl.min(tl.where(best == top, best_token, num_tokens), 0)

    is_greedy = _is_greedy(temperature, tl.load(top_k_ptr + row), tl.load(top_p_ptr + row))
    if finite & (is_greedy == 0):
        mass = tl.load(mass_ptr + of_piece, mask=piece < num_pieces, other=0.0)
        sums = tl.cumsum(mass, 0)
        target = philox_uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row)) * tl.max(sums, 0)
        last = tl.max(tl.where(mass > 0.0, piece, -1), 0)
        chosen = tl.min(tl.where(sums > target, piece, last), 0)
        before = tl.sum(tl.where(piece < chosen, mass, 0.0), 0)
        x = _load_piece(row_ptr, chosen, num_tokens, BLOCK)
        weights = tl.where(x >= tl.load(threshold_ptr + row), tl.exp2((x - top) * heat_log2), 0.0)
        lane = chosen * BLOCK + tl.arange(0, BLOCK)
        exceeds = (before + tl.cumsum(weights, 0) > target) & (weights > 0.0)
        drawn = tl.min(tl.where(exceeds, lane, num_tokens), 0)
        last_kept = tl.max(tl.where(weights > 0.0, lane, -1), 0)
        drawn = tl.where(drawn < num_tokens, drawn, last_kept)            # the scan rounds otherwise than the sum
        token = tl.where(drawn >= 0, drawn, token)

    token = tl.where(finite, token, 0)
    chosen_logit = tl.load(row_ptr + token).to(tl.float32)
    log_prob = ((chosen_logit - top) * heat_log2 - tl.log2(total)) * LN_2
    tl.store(token_ptr + row, token.to(token_ptr.dtype.element_ty))
    tl.store(log_prob_ptr + row, tl.where(finite, log_prob, float("nan")))
    tl.store(finite_ptr + row, finite.to(finite_ptr.dtype.element_ty))


def sample_token(
    logits, temperature, top_k, top_p, seed, position, tokens=None, log_probs=None, finite=None, min_p=None,
    wants_log_prob=None, only_greedy=False,
):
    """One token per row; see the module's docstring for shapes. Returns (tokens, log_probs, finite).

    A log-prob costs nothing beside the token, so each row has one, whatever wants_log_prob says.
    """
    num_rows, vocabulary = logits.shape

    def made(*shape, dtype=torch.float32, make=torch.empty):
        return make(num_rows, *shape, dtype=dtype, device=logits.device)

    tokens = made(dtype=torch.int32) if tokens is None else tokens
    log_probs = made() if log_probs is None else log_probs
    finite = made(dtype=torch.bool) if finite is None else finite
    assert logits.stride(1) == 1
    if num_rows == 0:
        return tokens, log_probs, finite

    block = min(MAX_BLOCK, triton.next_power_of_2(vocabulary))
    num_pieces = triton.cdiv(vocabulary, block)
    grid = num_rows, num_pieces
    sizes = vocabulary, logits.stride(0)
    settings = dict(BLOCK=block, PIECES=triton.next_power_of_2(num_pieces))
    best, total, best_token = made(num_pieces), made(num_pieces), made(num_pieces, dtype=torch.int32)
    threshold, mass = made(), made(num_pieces)
    _sample_piece_kernel[grid](logits, temperature, best, best_token, total, *sizes, BLOCK=block, num_warps=4)
    if not only_greedy:
        min_p = made(make=torch.zeros) if min_p is None else min_p
        num_digits = 3 if logits.dtype == torch.float32 else 2
        filters = made(2, num_digits, BUCKETS.value, dtype=torch.int64, make=torch.zeros)
        digits, missing = made(2, num_digits, dtype=torch.int64), made(2, num_digits, dtype=torch.int64)
        for number in range(2 * num_digits):
            _sample_digit_kernel[grid](
                logits, temperature, top_k, top_p, best, total, filters, digits, missing, threshold,
                *divmod(number, num_digits), *sizes, DIGITS=num_digits, num_warps=4, **settings,
            )
        _sample_mass_kernel[grid](
            logits, temperature, top_k, top_p, min_p, best, total, filters, digits, missing, threshold, mass, *sizes,
            DIGITS=num_digits, num_warps=4, **settings,
        )
    _sample_draw_kernel[(num_rows,)](
        logits, temperature, top_k, top_p, seed, position, best, best_token, total, threshold, mass,
        tokens, log_probs, finite, *sizes, num_pieces, num_warps=4, **settings,
    )
    return tokens, log_probs, finite
