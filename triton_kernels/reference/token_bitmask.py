"""Forbid the tokens whose bit is not set in a bitmask.

Arguments, results and rules are those of the kernel, in triton_kernels/token_bitmask.py.
"""

import torch


def token_bitmask(logits, bitmask):
    """Set the logits of forbidden tokens to -inf, in place. See the module docstring for shapes."""
    bits = bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bitmask.device) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
