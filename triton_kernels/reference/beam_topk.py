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

A group's result depends on nothing but that group, and its first k candidates do not depend on K.
"""

import torch


def beam_topk(logits, temperature, cum_log_probs, diversity_rate, group_starts, num_candidates, max_rows,
              are_log_probs=None):
    """The best continuations of each group; see the module's docstring for shapes."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    vocabulary = x.shape[1]
    finite = ~(x.isnan().any(1) | (x == torch.inf).any(1) | (x == -torch.inf).all(1))
    x = x.masked_fill(~finite[:, None], 0)                                     # rows whose result is thrown away
    divisor = temperature.to(x.dtype).where(temperature != 0, 1)
    log_p = (x / divisor[:, None]).log_softmax(1)
    if are_log_probs is not None:
        log_p = x.where(are_log_probs[:, None], log_p)

    # Equals of the last one that is kept: which of them `topk` takes depends on K. So everything from there on is
    # looked at, and there are few of them.
    kept = min(num_candidates, vocabulary)
    smallest = log_p.topk(kept, 1).values[:, -1:]
    usable = finite & (cum_log_probs > -torch.inf)
    row, token = ((log_p >= smallest) & (log_p > -torch.inf) & usable[:, None]).nonzero(as_tuple=True)
    log_prob = log_p[row, token]
    row, token, log_prob, rank = _ranked(row, log_prob, len(x), row, token, log_prob)
    row, token, log_prob, rank = (values[rank < kept] for values in (row, token, log_prob, rank))
    return *best_of_groups(row, token, log_prob, rank, cum_log_probs, diversity_rate, group_starts,
                           num_candidates), finite


def best_of_groups(row, token, log_prob, rank, cum_log_probs, diversity_rate, group_starts, num_candidates):
    """(log_probs, parents, tokens), from the best candidates [c] of the rows that yield any."""
    num_groups, device = len(diversity_rate), log_prob.device
    group = torch.searchsorted(group_starts.long(), row, right=True) - 1
    score = cum_log_probs[row] + log_prob - diversity_rate[group] * rank
    group, row, token, log_prob, place = _ranked(group, score, num_groups, group, row, token, log_prob)
    chosen = place < num_candidates
    group, place = group[chosen], place[chosen]

    log_probs = torch.full((num_groups, num_candidates), -torch.inf, dtype=log_prob.dtype, device=device)
    parents, tokens = torch.zeros((2, num_groups, num_candidates), dtype=torch.int32, device=device)
    log_probs[group, place] = log_prob[chosen]
    parents[group, place] = (row[chosen] - group_starts[group]).int()
    tokens[group, place] = token[chosen].int()
    return log_probs, parents, tokens


def _ranked(bin, value, num_bins, *columns):
    """The columns by bin, then by falling value, in their order among equals; and each one's place in its bin."""
    order = value.argsort(descending=True, stable=True)
    order = order[bin[order].argsort(stable=True)]
    counts = torch.bincount(bin, minlength=num_bins)
    places = torch.arange(len(bin), dtype=torch.int64, device=bin.device) - (counts.cumsum(0) - counts)[bin[order]]
    return *(column[order] for column in columns), places
