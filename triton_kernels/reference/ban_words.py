"""Forbid the last token of every word whose other tokens are the last tokens of the sequence.

    words = the list that starts at lists[list_start]: first the `count` numbers ends[0], ends[1], ..., ascending, then
            the tokens of all words. Word i has the tokens ends[i-1] .. ends[i] - 1, and word 0 begins with token 0
    t     = the first `length` tokens of the row's history
    logits[w[n-1]] = -inf for every word w of n tokens with t[length-n+1 ..] equal to w[.. n-2]. A word of one token is
    always forbidden.

Shapes      logits                   [R, V]   float32, R rows of V tokens, contiguous rows, any row stride
            history                  [H, C]   int32, contiguous rows, any row stride
            history_row              [R] int64   row of `history` with the sequence of each row of logits
            length                   [R] int64   number of tokens of the sequence in its row of `history`, at most C
            lists                    [L] int32   lists of words, as above
            list_start               [R] int32   start of the row's list
            count                    [R] int32   number of words in the row's list
            max_count                at least the largest count
Unused      history and history_row of a row whose words all have one token; history_row is then arbitrary
Mutates     logits. NaN stays and +inf becomes NaN, so that a later check still finds them. The tokens of all words must
            be below V.
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
