"""Penalties on a CPU, row by row. Same contract as triton_kernels/token_penalties.py.

A sequence has few tokens compared to the vocabulary, so only the logits of its tokens are gathered, changed and written
back.
"""

import numpy as np

LARGEST = np.finfo(np.float32).max


def token_penalties(logits, history, history_row, length, repetition, presence, frequency, ignored):
    """Apply the penalties to `logits`, in place, and return `logits`.

    See triton_kernels/token_penalties.py for shapes.
    """
    penalized = ((repetition != 1) | (presence != 0) | (frequency != 0)).nonzero()[:, 0].tolist()
    numbers, tokens_of, history_row, length = logits.numpy(), history.numpy(), history_row.numpy(), length.numpy()
    repetition, presence, frequency = repetition.numpy(), presence.numpy(), frequency.numpy()
    ignored = ignored.numpy()
    for row in penalized:
        tokens = tokens_of[history_row[row], : length[row]]
        counted = tokens[ignored[row] :]
        if tokens.max(initial=-1) >= logits.shape[1]:       # prompt-tuning tokens have no logit
            tokens, counted = tokens[tokens < logits.shape[1]], counted[counted < logits.shape[1]]
        _penalize(numbers[row], tokens, counted, repetition[row], presence[row], frequency[row])
    return logits


def _penalize(logits: np.ndarray, tokens: np.ndarray, counted: np.ndarray, repetition: np.float32,
              presence: np.float32, frequency: np.float32) -> None:
    """Change the logits [vocab] of `tokens` [n], which may repeat. Finite logits stay finite.

    counted   [m] the last m of `tokens`; presence and frequency penalties count these tokens only
    """
    before = logits[tokens]                             # a repeated token gets the same value each time
    with np.errstate(over="ignore", invalid="ignore"):
        after = np.where(before < 0, before * repetition, before / repetition)
        if len(counted) == len(tokens):
            after -= presence
            if frequency != 0:
                after -= frequency * np.bincount(tokens)[tokens].astype(np.float32)
        elif presence != 0 or frequency != 0:
            counts = np.bincount(counted, minlength=int(tokens.max()) + 1)[tokens].astype(np.float32)
            after -= presence * (counts > 0)
            after -= frequency * counts
    if not np.isfinite(after).all():
        after = np.where(np.isfinite(before), np.nan_to_num(after, nan=-LARGEST), before)
    logits[tokens] = after
