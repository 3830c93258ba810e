"""Forbid the tokens whose bit is not set in a bitmask.

    logits[r, t] = -inf        if bit t % 32 of bitmask[r, t // 32] is 0

Shapes      logits                   [R, V]   any float dtype
            bitmask                  [R, W] int32, W >= V / 32; bit 0 is the lowest; bits of tokens past V are not read
Mutates     logits.
"""

import torch


def token_bitmask(logits, bitmask):
    """Set the logits of forbidden tokens to -inf, in place. See the module docstring for shapes."""
    bits = bitmask[:, :, None] >> torch.arange(32, dtype=torch.int32, device=bitmask.device) & 1
    logits.masked_fill_(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)
