"""Bad words on a CPU. Same contract as triton_kernels/ban_words.py.

The words of all rows are compared at once, token by token, backward from the next-to-last token. The first comparison
rules out most words.
"""

import numpy as np


def ban_words(logits, history, history_row, length, lists, list_start, count, max_count):
    """Set the logits of forbidden tokens to -inf, in place. Returns `logits`.

    See triton_kernels/ban_words.py for shapes.
    """
    rows, tokens = words_lacking_last_token(history, history_row, length, lists, list_start, count)
    with np.errstate(invalid="ignore"):                             # +inf becomes NaN
        logits.numpy()[rows, tokens] -= np.inf
    return logits


def words_lacking_last_token(history, history_row, length, lists, list_start, count):
    """Find the words that lack only their last token: the history of the row ends with the word's other tokens.

    Returns (row [n], last token [n]) of the found words, as numpy arrays. The arguments are tensors as in
    `ban_words`.
    """
    history, lists, start, count = history.numpy(), lists.numpy(), list_start.numpy(), count.numpy()
    rows = count.nonzero()[0]
    counts = count[rows]
    row = np.repeat(rows, counts)                                   # of each word
    word = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    end = lists[start[row] + word]
    begin = np.where(word > 0, lists[start[row] + np.maximum(word - 1, 0)], 0)
    last, others = start[row] + count[row] + end - 1, end - begin - 1
    matched = others == 0
    if not matched.all():
        history_row, length = history_row.numpy()[row], length.numpy()[row]
        longer, back = np.flatnonzero(~matched & (others <= length)), 1
        while len(longer):
            held = history[history_row[longer], length[longer] - back]
            longer = longer[lists[last[longer] - back] == held]
            is_done = others[longer] == back
            matched[longer[is_done]] = True
            longer, back = longer[~is_done], back + 1
    return row[matched], lists[last[matched]]
