"""Make the tokens that a sequence holds less likely, or more.

    n(id) = how often `id` is among the first `length` tokens of the row's history
    x     = logits[id], wherever n(id) > 0
    x     = x * repetition where x < 0, else x / repetition
    m(id) = how often `id` is among those from token `ignored` on
    x     = x - (presence where m(id) > 0) - frequency * m(id)

Shapes      logits                   [R, V]   float32, contiguous rows, any row stride
            history                  [H, C]   int32, contiguous rows, any row stride; ids of V and more have no logit
            history_row              [R] int64   the row of `history` that belongs to a row of logits
            length                   [R] int64   tokens of it that count, at most C
            repetition               [R] float32   above 0; 1: nothing
            presence, frequency      [R] float32   0: nothing
            ignored                  [R] int32   leading tokens that presence and frequency do not count, 0..length
Neutral     a row with 1, 0 and 0 is left as it is, and its history is not looked at: history_row and length may be any
Mutates     logits. What was finite stays finite: it ends at the largest float32. What was not stays as it is.
"""

import torch

LARGEST = torch.finfo(torch.float32).max


def token_penalties(logits, history, history_row, length, repetition, presence, frequency, ignored):
    """Changes and returns `logits`; see the module's docstring for shapes."""
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
