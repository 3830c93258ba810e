"""Forbid the last token of every word whose other tokens are the last ones of the sequence.

    words = lists[list_start ..] = `count` ends, rising, then the tokens of all words: word w is the tokens
            ends[w-1] .. ends[w] - 1, ends[-1] taken for 0
    a word of n tokens w, and the first `length` tokens t of the row's history:
    where t[length-n+1 ..] equals w[.. n-2], logits[w[n-1]] = -inf. A word of one token is always forbidden.

Shapes      logits                   [R, V]   float32, contiguous rows, any row stride
            history                  [H, C]   int32, contiguous rows, any row stride
            history_row              [R] int64   the row of `history` that belongs to a row of logits
            length                   [R] int64   tokens of it that count, at most C
            lists                    [L] int32   lists of words, as above
            list_start               [R] int32   where the row's list begins
            count                    [R] int32   its words; 0: none
            most                     number >= the largest count
Neutral     the history of a row that has no word, or only words of one token, is not looked at: history_row may be any
Mutates     logits. Ids must be below V.
"""

import torch


def words_of(lists, list_start, count):
    """The words of one list, as lists of tokens."""
    numbers = lists[int(list_start) :].tolist()
    ends, tokens = numbers[: int(count)], numbers[int(count) :]
    return [tokens[begin:end] for begin, end in zip([0, *ends], ends)]


def is_begun(word, history, history_row, length):
    """Whether all tokens of the word but its last are the last ones of the row's history."""
    others, length = len(word) - 1, int(length)
    if others == 0:
        return True
    return others <= length and history[int(history_row), length - others : length].tolist() == word[:-1]


def ban_words(logits, history, history_row, length, lists, list_start, count, most):
    """Changes and returns `logits`; see the module's docstring for shapes."""
    for row in range(len(logits)):
        for word in words_of(lists, list_start[row], count[row]):
            if is_begun(word, history, history_row[row], length[row]):
                logits[row, word[-1]] = -torch.inf
    return logits
