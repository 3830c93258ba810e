"""Forbid the tokens that would repeat an n-gram of the sequence.

Arguments, results and rules are those of the kernel, in triton_kernels/ban_ngrams.py.
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
