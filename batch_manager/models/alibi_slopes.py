"""The slopes of ALiBi, as BLOOM and Falcon have them."""

import math

import torch


def alibi_slopes(num_heads: int) -> tuple[float, ...]:
    """A slope for each head: powers of one number; where the heads are no power of two, after those of the next lower
    one every second power of another number (Press et al. 2022). Computed in float32, as transformers does."""
    lower = 1 << num_heads.bit_length() - 1
    slopes = _powers(lower, range(1, lower + 1)) + _powers(2 * lower, range(1, 2 * (num_heads - lower), 2))
    return tuple(slopes)


def _powers(heads: int, exponents: range) -> list[float]:
    base = torch.tensor(2 ** -(2 ** -(math.log2(heads) - 3)), dtype=torch.float32, device="cpu")
    return torch.pow(base, torch.tensor(list(exponents), dtype=torch.int32, device="cpu")).tolist()
