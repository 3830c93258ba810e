"""Forbid the tokens that would end an n-gram which the sequence holds already.

    the first `length` tokens t of the row's history, n = size: for every s with t[s .. s+n-2] equal to the last n-1
    tokens, logits[t[s+n-1]] = -inf

Shapes      logits                   [R, V]   float32, contiguous rows, any row stride
            history                  [H, C]   int32, contiguous rows, any row stride; ids of V and more have no logit
            history_row              [R] int64   the row of `history` that belongs to a row of logits
            length                   [R] int64   tokens of it that count, at most C
            size                     [R] int32   n; 0: nothing. 1 forbids whatever the sequence holds
Neutral     a row of size 0 is left as it is, and its history is not looked at: history_row and length may be any
Mutates     logits
"""

import torch


def ban_ngrams(logits, history, history_row, length, size):
    """Changes and returns `logits`; see the module's docstring for shapes."""
    for row in range(len(logits)):
        others = int(size[row]) - 1
        if others < 0:
            continue
        tokens = history[history_row[row], : length[row]].tolist()
        for start in range(len(tokens) - others):
            banned = tokens[start + others]
            if tokens[start : start + others] == tokens[len(tokens) - others :] and banned < logits.shape[1]:
                logits[row, banned] = -torch.inf
    return logits
