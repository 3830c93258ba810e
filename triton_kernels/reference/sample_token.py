"""Draw one token per row of logits.

    x    = logits / temperature,  p = softmax(x)
    keep = the top_k largest logits (ties of the last one kept), then, in what they renormalise to, the smallest set of
           largest probabilities whose sum reaches top_p (ties of the last one kept)
    u    = uniform(seed, position), from `philox`
    token    = the smallest id whose cumulative kept probability, in id order, exceeds u * (sum of the kept)
    log_prob = log p[token], before any filtering

Shapes      logits                   [R, V]   any float dtype, contiguous rows, any row stride; -inf = forbidden token
            temperature              [R] float32   0: greedy, and the log-prob is that of temperature 1
            top_k                    [R] int32   0: no limit by count
            top_p                    [R] float32   0 with top_k > 0, or 1 and more: no limit by mass
            seed                     [R] int64   the bits of the request's unsigned seed
            position                 [R] int32   position of the token being drawn in its sequence
            tokens                   [R] int32 (or any integer dtype)      the last three may be passed in, so that
            log_probs                [R] float32                           a captured graph writes to fixed places
            finite                   [R] bool
Greedy      temperature == 0, or top_k == 1, or top_k == 0 and top_p == 0: the largest logit, the lowest id among
            equals.
Mutates     tokens, log_probs, finite. finite is False where a row holds NaN or +inf or nothing but -inf; the token is
            then 0 and the log-prob NaN.
Returns     (tokens, log_probs, finite).

A row's result depends on nothing but that row.
"""

import torch

from .philox import uniform


def sample_token(
    logits, temperature, top_k, top_p, seed, position, tokens=None, log_probs=None, finite=None
):
    """One token per row; see the module's docstring for shapes."""
    num_rows = logits.shape[0]
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device) if tokens is None else tokens
    log_probs = torch.empty(num_rows, dtype=torch.float32, device=logits.device) if log_probs is None else log_probs
    finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device) if finite is None else finite

    uniforms = uniform(seed, position).double()
    for row in range(num_rows):
        x = logits[row].double()
        finite[row] = not (x.isnan().any() or (x == torch.inf).any() or (x == -torch.inf).all())
        if not finite[row]:
            tokens[row], log_probs[row] = 0, torch.nan
            continue

        heat, k, mass = float(temperature[row]), int(top_k[row]), float(top_p[row])
        log_p = (x / (heat or 1.0)).log_softmax(-1)
        if heat == 0 or k == 1 or (k == 0 and mass == 0):
            token = int((x == x.max()).nonzero()[0])                               # lowest id among equals
        else:
            token = _draw(x, log_p.exp(), k, mass, float(uniforms[row]))
        tokens[row], log_probs[row] = token, log_p[token]
    return tokens, log_probs, finite


def _draw(x, p, k, mass, uniform):
    """The token of one row: `x` its logits, `p` its probabilities."""
    if 0 < k < len(x):
        p = p.masked_fill(x < x.topk(k).values[-1], 0)
    if 0 < mass < 1:
        descending, order = p.sort(descending=True)
        reached = (descending.cumsum(0) >= mass * p.sum()).nonzero()
        last = order[int(reached[0]) if len(reached) else -1]
        p = p.masked_fill(x < x[last], 0)
    cumulative = p.cumsum(0)
    exceeding = (cumulative > uniform * cumulative[-1]).nonzero()
    return int(exceeding[0])
