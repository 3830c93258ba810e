"""The ALiBi bias (Press et al. 2022) of both attention kernels, whose scores are multiplied by log2(e).

    bias * log2(e) = log2(e) * (f(key position) - f(query position))
    f(p) = slope * p for a position p                        without rounding
    f(p) = factor * bfloat16(slope * bfloat16(p))            with rounding, as in Falcon. Slopes are bfloat16 numbers

The products are rounded if the kernel's argument alibi_bfloat16_factor is set. The argument is the factor.
"""

import triton
import triton.language as tl

from .soft_cap import LOG2_E


@triton.jit
def alibi(key_position, query_position, slope_log2, FACTOR_LOG2: tl.constexpr):
    """Return the bias of each pair of positions, times log2(e). All shapes broadcast.

    FACTOR_LOG2   0: the products of position and slope are not rounded. Above 0: the products are rounded to bfloat16
                  and then multiplied by FACTOR_LOG2, which is log2(e) * factor; the module docstring explains factor
    slope_log2    without rounding, slope * log2(e); with rounding, the slope
    """
    if FACTOR_LOG2 == 0:
        return slope_log2 * (key_position - query_position).to(tl.float32)
    return FACTOR_LOG2 * (_product(key_position, slope_log2) - _product(query_position, slope_log2))


@triton.jit
def _product(position, slope):
    """Return position * slope, rounded to bfloat16 as torch rounds the product of an integer and a bfloat16."""
    return _rounded(_rounded(position.to(tl.float32)) * slope)


@triton.jit
def _rounded(number):
    """Round to the nearest bfloat16, ties to even. Works on the bits, because Triton's interpreter casts toward zero.
    """
    bits = number.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    return bits.to(tl.float32, bitcast=True)


def alibi_factors(bfloat16_factor):
    """Return (factor of the slopes, FACTOR_LOG2), with which `alibi` returns the bias times log2(e).

    The caller multiplies the slopes by the first factor. Without rounding (`bfloat16_factor` is None), the result is
    (log2(e), 0). With rounding, it is (1, bfloat16_factor * log2(e)).
    """
    assert bfloat16_factor is None or bfloat16_factor > 0
    return (LOG2_E, 0.0) if bfloat16_factor is None else (1.0, bfloat16_factor * LOG2_E)
