"""Repetition, presence and frequency penalties of the tokens of a sequence.

Arguments, results and rules are those of the kernel, in triton_kernels/token_penalties.py.
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
