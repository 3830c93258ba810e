"""The best continuations of groups of beams.

Arguments, results and rules are those of the kernel, in triton_kernels/beam_topk.py.
"""

import torch


def beam_topk(logits, temperature, cum_log_probs, diversity_rate, group_starts, num_candidates, max_rows,
              are_log_probs=None):
    """Return the best continuations of each group. See the module docstring for shapes."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    vocabulary = x.shape[1]
    finite = ~(x.isnan().any(1) | (x == torch.inf).any(1) | (x == -torch.inf).all(1))
    x = x.masked_fill(~finite[:, None], 0)                                     # rows whose result is discarded
    divisor = temperature.to(x.dtype).where(temperature != 0, 1)
    log_p = (x / divisor[:, None]).log_softmax(1)
    if are_log_probs is not None:
        log_p = x.where(are_log_probs[:, None], log_p)

    # K determines which ties of the last kept value `topk` returns. Take all ties of this value instead; they are few.
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
    """Return (log_probs, parents, tokens), each [G, K], of the best candidates of each group.

    row, token, log_prob, rank   [c] candidates of all rows; the other arguments as in `beam_topk`
    """
    num_groups, device = len(diversity_rate), log_prob.device
    group = torch.searchsorted(group_starts.long(), row, right=True) - 1
    score = cum_log_probs[row] + log_prob - diversity_rate[group] * rank
    group, row, token, log_prob, rank = _ranked(group, score, num_groups, group, row, token, log_prob)
    chosen = rank < num_candidates
    group, rank = group[chosen], rank[chosen]

    log_probs = torch.full((num_groups, num_candidates), -torch.inf, dtype=log_prob.dtype, device=device)
    parents, tokens = torch.zeros((2, num_groups, num_candidates), dtype=torch.int32, device=device)
    log_probs[group, rank] = log_prob[chosen]
    parents[group, rank] = (row[chosen] - group_starts[group]).int()
    tokens[group, rank] = token[chosen].int()
    return log_probs, parents, tokens


def _ranked(bin, value, num_bins, *columns):
    """Sort entries by bin, then by descending value. The sort is stable.

    Returns the sorted columns, then the rank of each sorted entry in its bin.

    bin, value   [n] index of each entry's bin, below num_bins, and its value
    columns      arrays [n] with one element per entry
    """
    order = value.argsort(descending=True, stable=True)
    order = order[bin[order].argsort(stable=True)]
    counts = torch.bincount(bin, minlength=num_bins)
    ranks = torch.arange(len(bin), dtype=torch.int64, device=bin.device) - (counts.cumsum(0) - counts)[bin[order]]
    return *(column[order] for column in columns), ranks
