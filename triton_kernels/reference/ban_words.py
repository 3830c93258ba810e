"""Forbid the last token of every word whose other tokens are the last tokens of the sequence.

Arguments, results and rules are those of the kernel, in triton_kernels/ban_words.py.
"""

import torch


def words_of(lists, list_start, count):
    """Return the words of one list, as lists of tokens."""
    numbers = lists[int(list_start) :].tolist()
    ends, tokens = numbers[: int(count)], numbers[int(count) :]
    return [tokens[begin:end] for begin, end in zip([0, *ends], ends)]


def lacks_last_token(word, history, history_row, length):
    """Whether the row's history ends with all tokens of the word but the last."""
    others, length = len(word) - 1, int(length)
    if others == 0:
        return True
    return others <= length and history[int(history_row), length - others : length].tolist() == word[:-1]


def ban_words(logits, history, history_row, length, lists, list_start, count, max_count):
    """Set the logits of forbidden tokens to -inf, in place. Returns `logits`. See the module docstring for shapes."""
    for row in range(len(logits)):
        for word in words_of(lists, list_start[row], count[row]):
            if lacks_last_token(word, history, history_row[row], length[row]):
                logits[row, word[-1]] -= torch.inf
    return logits
