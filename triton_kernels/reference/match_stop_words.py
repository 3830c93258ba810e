"""Whether the token just drawn is the last one of a word.

    a row ends where a word of its list is the last tokens of (the first `length` tokens of its history, token)

Shapes      token                    [R]   any integer dtype
            history                  [H, C]   int32, contiguous rows, any row stride
            history_row              [R] int64   the row of `history` that belongs to a row
            length                   [R] int64   tokens of it that count, at most C: those before `token`
            lists                    [L] int32   lists of words, as `ban_words` has them
            list_start               [R] int32   where the row's list begins
            count                    [R] int32   its words; 0: none
            the result               [R] bool
Neutral     the history of a row that has no word, or only words of one token, is not looked at: history_row may be any
"""

import torch

from .ban_words import is_begun, words_of


def match_stop_words(token, history, history_row, length, lists, list_start, count):
    """[R] bool; see the module's docstring for shapes."""
    return torch.tensor([
        any(word[-1] == int(token[row]) and is_begun(word, history, history_row[row], length[row])
            for word in words_of(lists, list_start[row], count[row]))
        for row in range(len(token))], dtype=torch.bool, device=token.device)
