"""Log-probabilities of a prompt's tokens, from the logits of its context: what `echo` with `logprobs` tells."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class PromptLogProbs:
    """Of each token of a prompt; the first one follows nothing and has None.

    top_log_probs   the likeliest tokens at its place; empty where none were asked for
    """

    tokens: list[int]
    log_probs: list[float | None]
    top_log_probs: list[dict[int, float] | None]


def prompt_log_probs(logits: np.ndarray, tokens: Sequence[int], count: int) -> PromptLogProbs:
    """The log-probabilities of a prompt's tokens, each given those before it.

    logits   [n, vocab] float32: row i is what the model says after token i
    tokens   [n]
    count    how many of the likeliest tokens are told of each place
    """
    values: list[float | None] = [None]
    likeliest: list[dict[int, float] | None] = [None]
    following = np.asarray(tokens[1:])
    for start in range(0, len(following), ROWS_AT_ONCE):
        asked = following[start : start + ROWS_AT_ONCE]
        rows = logits[start : start + len(asked)]
        rows = rows - rows.max(1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(1, keepdims=True))
        values += rows[np.arange(len(asked)), asked].tolist()
        if count:
            likeliest += [_likeliest(row, count) for row in rows]
    return PromptLogProbs(list(tokens), values, likeliest if count else [])


def _likeliest(log_probs: np.ndarray, count: int) -> dict[int, float]:
    """The `count` largest, largest first; of equals the lowest id first."""
    least = np.partition(log_probs, -count)[-count] if count < len(log_probs) else -np.inf
    ids = np.flatnonzero(log_probs >= least)
    ids = ids[np.argsort(-log_probs[ids], kind="stable")][:count]
    return {int(token): float(log_probs[token]) for token in ids if log_probs[token] > -np.inf}
