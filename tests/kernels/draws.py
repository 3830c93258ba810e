"""How often tokens are drawn, compared with the probabilities that temperature, top-k and top-p define."""

import numpy as np
import torch

KNOBS = [(1.0, 0, 1.0), (0.6, 20, 0.0), (1.4, 40, 0.8), (1.0, 0, 0.7), (3.0, 0, 0.95)]    # temperature, top_k, top_p
VOCAB = 200                                       # three blocks and a part of one


def arrays(knobs, seeds, positions):
    """Return the arguments of `sample` after the logits, from a list of knobs."""
    temperature, top_k, top_p = zip(*knobs)
    return (np.array(temperature, np.float32), np.array(top_k, np.int32), np.array(top_p, np.float32),
            np.array(seeds, np.int64), np.array(positions, np.int32))


def row_of_logits(vocab=VOCAB):
    return torch.randn(1, vocab, generator=torch.Generator().manual_seed(5))[0] * 2


def exact_distribution(row, temperature, top_k, top_p):
    """Return the probabilities of the tokens in float64, by the definition of temperature, top-k and top-p.

    row   [vocab] logits
    """
    p = (row.double() / temperature).softmax(-1)
    if top_k:
        p = torch.where(row >= row.topk(top_k).values[-1], p, 0)
    if 0 < top_p < 1:
        p = p / p.sum()
        descending = p.sort(descending=True)
        first_out = int((descending.values.cumsum(0) < top_p).sum()) + 1
        kept = torch.zeros_like(p)
        kept[descending.indices[:first_out]] = 1
        p = p * kept
    return (p / p.sum()).numpy()


def standard_deviations(counts, expected):
    """Return by how many of its standard deviations chi-square is above its mean. Infinite: a count should be 0.

    counts, expected   numpy arrays of the same shape; expected counts below 5 share one cell
    """
    if counts[expected == 0].sum():
        return np.inf
    often = expected >= 5
    observed, wanted = (np.append(cells[often], cells[~often].sum()) for cells in (counts, expected))
    if wanted[-1] == 0:
        observed, wanted = observed[:-1], wanted[:-1]
    freedom = len(wanted) - 1
    return (((observed - wanted) ** 2 / wanted).sum() - freedom) / (2 * freedom) ** 0.5 if freedom else 0.0
