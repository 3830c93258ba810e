"""Sample one token per row of logits.

Arguments, results and rules are those of the kernel, in triton_kernels/sample_token.py.
"""

import torch

from .philox import BLOCKS, TOKENS, uniform

BLOCK = 64               # ids of a block


def sample_token(
    logits, temperature, top_k, top_p, seed, position, tokens=None, log_probs=None, finite=None, min_p=None,
    wants_log_prob=None, only_greedy=False, slots=None, end_id=None, finish=None, last_tokens=None, counts=None,
):
    """Sample one token per row. Ignores `counts`. See the module docstring for shapes."""
    num_rows = logits.shape[0]
    if slots is not None:
        temperature, top_k, top_p, seed = temperature[slots], top_k[slots], top_p[slots], seed[slots]
        min_p = None if min_p is None else min_p[slots]
    tokens = torch.empty(num_rows, dtype=torch.int32, device=logits.device) if tokens is None else tokens
    log_probs = torch.empty(num_rows, dtype=torch.float32, device=logits.device) if log_probs is None else log_probs
    finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device) if finite is None else finite

    x = logits.double()
    finite.copy_(~(x.isnan().any(1) | (x == torch.inf).any(1) | (x == -torch.inf).all(1)))
    x = x.masked_fill(~finite.bool()[:, None], 0)                              # rows whose result is discarded
    divisor = temperature.double().where(temperature != 0, 1)
    log_p = (x / divisor[:, None]).log_softmax(1)

    greedy = (temperature == 0) | (top_k == 1) | ((top_k == 0) & (top_p == 0))
    largest = (x == x.amax(1, keepdim=True)).int().argmax(1)                   # the first of several
    min_p = torch.zeros_like(top_p) if min_p is None else min_p
    lowest = x.amax(1) + temperature.double() * min_p.double().log()
    sampled = drawn(kept(x, log_p.exp(), top_k, top_p, lowest), seed, position)
    chosen = torch.where(greedy, largest, sampled).masked_fill(~finite.bool(), 0)

    tokens.copy_(chosen)
    log_probs.copy_(log_p.gather(1, chosen[:, None])[:, 0].masked_fill(~finite.bool(), torch.nan))
    if finish is not None or last_tokens is not None:
        record_tokens(tokens, position, slots, end_id, finish, last_tokens)
    return tokens, log_probs, finite


def record_tokens(tokens, position, slots, end_id, finish, last_tokens):
    """Store the tokens in `last_tokens`. Set `finish` to 1 for each end id, else 0. Skips a tensor that is None."""
    slots = torch.arange(len(tokens), dtype=torch.int64, device=tokens.device) if slots is None else slots
    if finish is not None:
        finish.copy_(tokens == end_id[slots])
    if last_tokens is not None:
        last_tokens[slots, position.long() % last_tokens.shape[1]] = tokens.to(last_tokens.dtype)


def kept(x, p, top_k, top_p, lowest):
    """Return the probabilities [R, V] of the tokens that the filters keep, and 0 for others; they are not renormalized.

    x        [R, V] logits
    p        [R, V] probabilities
    lowest   the smallest logit that min-p keeps
    """
    vocabulary = x.shape[1]
    descending = x.sort(dim=1, descending=True).values
    last = torch.where((top_k > 0) & (top_k < vocabulary), top_k, vocabulary).long() - 1
    p = p.masked_fill(x < descending.gather(1, last[:, None]), 0)

    cumulative = p.sort(dim=1, descending=True).values.cumsum(1)
    limited = (top_p > 0) & (top_p < 1)
    reached = cumulative >= (top_p.double() * cumulative[:, -1])[:, None]
    last = torch.where(limited, reached.int().argmax(1), vocabulary - 1)
    p = p.masked_fill(x < descending.gather(1, last[:, None]), 0)
    return p.masked_fill(x < lowest[:, None], 0)


def drawn(p, seed, position, purposes=(BLOCKS, TOKENS)):
    """Return a token of each row [R], drawn from weights p [R, V] with the random numbers of two purposes."""
    size = min(BLOCK, p.shape[1])
    p = torch.nn.functional.pad(p, (0, -p.shape[1] % size)).unflatten(1, (-1, size))
    block = (p.sum(2).log() + _gumbels(seed, position, purposes[0], p.shape[1])).argmax(1)
    inside = p[torch.arange(len(p), dtype=torch.int64, device=p.device), block]
    return block * size + (inside.log() + _gumbels(seed, position, purposes[1], size)).argmax(1)


def _gumbels(seed, position, purpose, count):
    """Return [R, count] float64: the numbers G(purpose, 0 .. count - 1) of each row."""
    number = torch.arange(count, dtype=torch.int64, device=seed.device).repeat(len(seed))
    u = uniform(seed.repeat_interleave(count), position.repeat_interleave(count), purpose, number)
    return -(-u.double().log()).log().unflatten(0, (len(seed), count))
