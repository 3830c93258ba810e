"""The ban of repeated n-grams on a CPU, row by row. Same contract as triton_kernels/ban_ngrams.py.

For n-grams of n tokens, the last n - 1 tokens of a sequence are compared with all earlier positions at once, token by
token. The comparison begins with the last token, which rules out most positions.
"""

import numpy as np


def ban_ngrams(logits, history, history_row, length, size):
    """Set the logits of forbidden tokens to -inf, in place. Returns `logits`.

    See triton_kernels/ban_ngrams.py for shapes.
    """
    numbers, tokens_of, size = logits.numpy(), history.numpy(), size.numpy()
    history_row, length = history_row.numpy(), length.numpy()
    for row in size.nonzero()[0].tolist():
        banned = repeating_tokens(tokens_of[history_row[row], : length[row]], int(size[row]))
        with np.errstate(invalid="ignore"):             # +inf becomes NaN
            numbers[row, banned[banned < logits.shape[1]]] -= np.inf
    return logits


def repeating_tokens(tokens: np.ndarray, size: int) -> np.ndarray:
    """Return the tokens that, appended to `tokens` [n], would repeat one of its n-grams of `size` tokens."""
    others = size - 1
    if len(tokens) < size:
        return tokens[:0]
    last = tokens[len(tokens) - others :]
    starts = np.arange(len(tokens) - others)
    for offset in range(others - 1, -1, -1):
        starts = starts[tokens[starts + offset] == last[offset]]
        if not len(starts):
            break
    return tokens[starts + others]
