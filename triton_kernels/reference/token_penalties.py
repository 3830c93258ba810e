"""Repetition, presence and frequency penalties of the tokens of a sequence.

    n(id) = number of occurrences of `id` in the first `length` tokens of the row's history
    x     = logits[id], for all ids with n(id) > 0
    x     = x * repetition if x < 0, else x / repetition
    m(id) = number of those occurrences from token `ignored` on
    x     = x - (presence if m(id) > 0) - frequency * m(id)

Shapes      logits                   [R, V]   float32, R rows of V tokens, contiguous rows, any row stride
            history                  [H, C]   int32, contiguous rows, any row stride; ids >= V have no logit
            history_row              [R] int64   row of `history` with the sequence of each row of logits
            length                   [R] int64   number of tokens of the sequence in its row of `history`, at most C
            repetition               [R] float32   above 0; 1: off
            presence, frequency      [R] float32   0: off
            ignored                  [R] int32   number of leading tokens that presence and frequency ignore, 0..length
Unused      history, history_row and length of a row with repetition 1, presence 0 and frequency 0. The row is
            unchanged; history_row and length are then arbitrary
Mutates     logits. Finite logits stay finite: they saturate at the largest float32. NaN and infinite logits are
            unchanged.
"""

import torch

LARGEST = torch.finfo(torch.float32).max


def token_penalties(logits, history, history_row, length, repetition, presence, frequency, ignored):
    """Apply the penalties to `logits`, in place, and return `logits`. See the module docstring for shapes."""
    vocabulary = logits.shape[1]
    for row in range(len(logits)):
        if repetition[row] == 1 and presence[row] == 0 and frequency[row] == 0:
            continue
        tokens = history[history_row[row], : length[row]].long()
        seen = torch.bincount(tokens[tokens < vocabulary], minlength=vocabulary) > 0
        counted = tokens[ignored[row] :]
        counts = torch.bincount(counted[counted < vocabulary], minlength=vocabulary)
        before = logits[row]
        x = torch.where(before < 0, before * repetition[row], before / repetition[row])
        x = x - presence[row] * (counts > 0) - frequency[row] * counts
        x = x.nan_to_num(nan=-LARGEST, posinf=LARGEST, neginf=-LARGEST).clamp(-LARGEST, LARGEST)
        logits[row] = torch.where(seen & before.isfinite(), x, before)
    return logits
