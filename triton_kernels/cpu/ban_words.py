"""Bad words on a CPU. The contract is that of triton_kernels/ban_words.py.

The words of all rows are compared at once, a token at a time from the last but one, which rules out most of them.
"""

import numpy as np


def ban_words(logits, history, history_row, length, lists, list_start, count, most):
    """Changes and returns `logits`; see the kernel's docstring for shapes."""
    rows, tokens = begun_words(history, history_row, length, lists, list_start, count)
    logits.numpy()[rows, tokens] = -np.inf
    return logits


def begun_words(history, history_row, length, lists, list_start, count):
    """([n] row, [n] last token) of each word whose other tokens are the last ones of its row's history.

    The arguments are tensors, as `ban_words` has them; the results are numpy arrays.
    """
    history, lists, start, count = history.numpy(), lists.numpy(), list_start.numpy(), count.numpy()
    rows = count.nonzero()[0]
    counts = count[rows]
    row = np.repeat(rows, counts)                                   # of each word
    word = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    end = lists[start[row] + word]
    begin = np.where(word > 0, lists[start[row] + np.maximum(word - 1, 0)], 0)
    last, others = start[row] + count[row] + end - 1, end - begin - 1
    begun = others == 0
    if not begun.all():
        history_row, length = history_row.numpy()[row], length.numpy()[row]
        longer, back = np.flatnonzero(~begun & (others <= length)), 1
        while len(longer):
            held = history[history_row[longer], length[longer] - back]
            longer = longer[lists[last[longer] - back] == held]
            is_done = others[longer] == back
            begun[longer[is_done]] = True
            longer, back = longer[~is_done], back + 1
    return row[begun], lists[last[begun]]
