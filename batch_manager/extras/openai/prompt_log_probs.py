"""Log-probabilities of prompt tokens, from context logits, for `echo` with `logprobs`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ROWS_AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class PromptLogProbs:
    """Log-probabilities of the tokens of a prompt. The entries of the first token are None.

    log_probs       log-probability of each token, given the tokens before it
    top_log_probs   for each token, the likeliest tokens in its place, with their log-probabilities; empty if not
                    requested
    """

    tokens: list[int]
    log_probs: list[float | None]
    top_log_probs: list[dict[int, float] | None]


def prompt_log_probs(logits: np.ndarray, tokens: Sequence[int], count: int) -> PromptLogProbs:
    """Return the log-probability of each token of the prompt, and those of the likeliest tokens at its position.

    logits   [n, vocab] float32; row i has the logits after token i. The entries of token i + 1 are computed from
             row i
    tokens   [n]
    count    number of likeliest tokens for each prompt token; 0: none
    """
    values: list[float | None] = [None]
    likeliest: list[dict[int, float] | None] = [None]
    following = np.asarray(tokens[1:])
    for start in range(0, len(following), ROWS_AT_ONCE):
        targets = following[start : start + ROWS_AT_ONCE]
        rows = logits[start : start + len(targets)]
        rows = rows - rows.max(1, keepdims=True)
        rows -= np.log(np.exp(rows).sum(1, keepdims=True))
        values += rows[np.arange(len(targets)), targets].tolist()
        if count:
            likeliest += [_likeliest(row, count) for row in rows]
    return PromptLogProbs(list(tokens), values, likeliest if count else [])


def _likeliest(log_probs: np.ndarray, count: int) -> dict[int, float]:
    """Return the `count` largest log-probabilities, in descending order; ties in ascending order of ids. Omits -inf."""
    least = np.partition(log_probs, -count)[-count] if count < len(log_probs) else -np.inf
    ids = np.flatnonzero(log_probs >= least)
    ids = ids[np.argsort(-log_probs[ids], kind="stable")][:count]
    return {int(token): float(log_probs[token]) for token in ids if log_probs[token] > -np.inf}
