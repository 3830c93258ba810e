"""Forbid the tokens that would repeat an n-gram of the sequence.

    t = the first `length` tokens of the row's history, n = size
    logits[t[s+n-1]] = -inf for every s at which t[s .. s+n-2] equals the last n-1 tokens

Shapes      logits                   [R, V]   float32, R rows of V tokens, contiguous rows, any row stride
            history                  [H, C]   int32, contiguous rows, any row stride; ids >= V have no logit
            history_row              [R] int64   row of `history` with the sequence of each row of logits
            length                   [R] int64   number of tokens of the sequence in its row of `history`, at most C
            size                     [R] int32   n; 0: off; 1: forbid all tokens of the sequence
No effect   size 0: the row is unchanged, and its history is not read. history_row and length are then arbitrary
Mutates     logits. NaN stays and +inf becomes NaN, so that a later check still finds them
"""

import torch


def ban_ngrams(logits, history, history_row, length, size):
    """Set the logits of forbidden tokens to -inf, in place. Returns `logits`. See the module docstring for shapes."""
    for row in range(len(logits)):
        others = int(size[row]) - 1
        if others < 0:
            continue
        tokens = history[history_row[row], : length[row]].tolist()
        for start in range(len(tokens) - others):
            banned = tokens[start + others]
            if tokens[start : start + others] == tokens[len(tokens) - others :] and banned < logits.shape[1]:
                logits[row, banned] -= torch.inf
    return logits
