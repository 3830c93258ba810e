"""Whether the newly sampled token completes a stop word.

    a row ends if (the first `length` tokens of its history, token) ends with a word of its list

Shapes      token                    [R]   any integer dtype: the sampled token of each row
            history                  [H, C]   int32, contiguous rows, any row stride
            history_row              [R] int64   row of `history` with the sequence of each row
            length                   [R] int64   number of tokens before `token`, in the row of `history`, at most C
            lists                    [L] int32   lists of words, as in `ban_words`
            list_start               [R] int32   start of the row's list
            count                    [R] int32   number of words in the row's list
            the result               [R] bool
Unused      history and history_row of a row whose words all have one token; history_row is then arbitrary
"""

import torch

from .ban_words import lacks_last_token, words_of


def match_stop_words(token, history, history_row, length, lists, list_start, count):
    """Return [R] bool: whether the token of each row completes a stop word. See the module docstring for shapes."""
    return torch.tensor([
        any(word[-1] == int(token[row]) and lacks_last_token(word, history, history_row[row], length[row])
            for word in words_of(lists, list_start[row], count[row]))
        for row in range(len(token))], dtype=torch.bool, device=token.device)
