"""ALiBi slopes, for BLOOM and Falcon."""

import math

import torch


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """Return the ALiBi slope of each head (Press et al. 2022), computed in float32 as in transformers.

    If num_heads is a power of two, the slopes are powers of one base. Otherwise the slopes for the next lower power of
    two come first, followed by every second power of another base.
    """
    lower = 1 << num_heads.bit_length() - 1
    slopes = _powers(lower, range(1, lower + 1)) + _powers(2 * lower, range(1, 2 * (num_heads - lower), 2))
    return tuple(slopes)


def _powers(heads: int, exponents: range) -> list[float]:
    base = torch.tensor(2 ** -(2 ** -(math.log2(heads) - 3)), dtype=torch.float32, device="cpu")
    return torch.pow(base, torch.tensor(list(exponents), dtype=torch.int32, device="cpu")).tolist()
