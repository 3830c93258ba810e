"""The best continuations of groups of beams on a CPU. Same contract as triton_kernels/beam_topk.py.

The best tokens of a row are found by blocks (logit_blocks.py). These candidates are few, so the oracle's code ranks
them by group. Log-probs are computed only for the candidates, and only if the logits of some row are not log-probs yet
(see `are_log_probs` of the kernel).
"""

import torch

from ..reference.beam_topk import best_of_groups
from .logit_blocks import block_maxima, largest
from .sample_token import inverse_temperature_of


def beam_topk(logits, temperature, cum_log_probs, diversity_rate, group_starts, num_candidates, max_rows,
              are_log_probs=None):
    """Return the best continuations of each group. See triton_kernels/beam_topk.py for shapes."""
    x = logits if logits.dtype == torch.float32 else logits.float()
    blocks = block_maxima(x)
    maxima = blocks.amax(1)
    finite = maxima.isfinite()
    values, ids = _largest_in_order(x, blocks, min(num_candidates, x.shape[1]))
    log_probs = values
    if are_log_probs is None or not are_log_probs.all():
        log_probs = _log_probs(x, maxima, values, temperature)
        if are_log_probs is not None:
            log_probs = values.where(are_log_probs[:, None], log_probs)
    usable = finite & (cum_log_probs > -torch.inf)
    row, rank = ((values > -torch.inf) & usable[:, None]).nonzero(as_tuple=True)
    return *best_of_groups(row, ids[row, rank], log_probs[row, rank], rank, cum_log_probs, diversity_rate, group_starts,
                           num_candidates), finite


def _largest_in_order(x: torch.Tensor, blocks: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (values, ids) [r, count] of the largest logits of each row, descending; ties by ascending id.

    x        [r, vocab] logits
    blocks   [r, blocks] largest logit of each block of logits, as `block_maxima` returns them
    """
    values, ids = largest(x, blocks, min(count + 1, x.shape[1]))
    if values.shape[1] > count:
        # `largest` takes arbitrary ties of the last value. Take those with the lowest ids.
        tied = (values[:, count] == values[:, count - 1]).nonzero()[:, 0]
        values, ids = values[:, :count].clone(), ids[:, :count].clone()
        if len(tied):
            ordered = x[tied].sort(dim=1, descending=True, stable=True)
            values[tied], ids[tied] = ordered.values[:, :count], ordered.indices[:, :count]
    ids, order = ids.sort(1)
    values, order = values.gather(1, order).sort(dim=1, descending=True, stable=True)
    return values, ids.gather(1, order)


def _log_probs(x: torch.Tensor, maxima: torch.Tensor, values: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """Return the entries of log_softmax(x / temperature) for some logits of each row.

    x        [r, vocab] logits
    maxima   [r] largest logit of each row
    values   [r, count] logits of x for which to return the entries
    """
    inverse = inverse_temperature_of(temperature)[:, None]
    total = (x - maxima[:, None]).mul_(inverse).exp_().sum(1, keepdim=True)
    return (values - maxima[:, None]) * inverse - total.log_()
