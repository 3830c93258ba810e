"""What both attention kernels add to scores that are multiplied by log2(e), by positions (ALiBi, Press et al. 2022).

    log2(e) * (f(key position) - f(query position))
    f(p) = slope * p                                         without a factor
    f(p) = factor * bfloat16(slope * bfloat16(p))            with one; slopes are numbers of bfloat16
"""

import triton
import triton.language as tl

from .soft_cap import LOG2_E


@triton.jit
def alibi(key_position, query_position, slope_log2, FACTOR_LOG2: tl.constexpr):
    """slope_log2   slope * log2(e) without a factor; with one the slope itself. All shapes broadcast."""
    if FACTOR_LOG2 == 0:
        return slope_log2 * (key_position - query_position).to(tl.float32)
    return FACTOR_LOG2 * (_product(key_position, slope_log2) - _product(query_position, slope_log2))


@triton.jit
def _product(position, slope):
    """Rounded to bfloat16 as torch rounds the product of an integer and a bfloat16."""
    return _rounded(_rounded(position.to(tl.float32)) * slope)


@triton.jit
def _rounded(number):
    """The nearest number of bfloat16, the even one of two. By its bits: triton's interpreter casts towards zero."""
    bits = number.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return bits.to(tl.float32, bitcast=True)


def alibi_factors(bfloat16_factor):
    """(what slopes are multiplied with, FACTOR_LOG2) of the kernels."""
    assert bfloat16_factor is None or bfloat16_factor > 0
    return (LOG2_E, 0.0) if bfloat16_factor is None else (1.0, bfloat16_factor * LOG2_E)
