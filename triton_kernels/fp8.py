"""Numbers of e4m3 (a sign, 4 bits of exponent, 3 of mantissa), in which an FP8 KV cache stores keys and values.

Kernels get such a pool as codes, uint8, and see what a pool has by the type of its entries. Rounding is integer
arithmetic on every GPU: a step stores few numbers. It reads many. NVIDIA GPUs from sm_89 on have an instruction for
that (`DeviceLimits.widens_fp8`); the others, and Triton's interpreter, widen by integer arithmetic. Both are exact.
AMD's gfx942 has instructions for another format of 8 bits, which is not used.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def narrowed(entries, scale, dtype: tl.constexpr):
    """Return entries as a pool of `dtype` stores them. If it has codes, uint8: entries / scale, rounded to e4m3.

    The quotient is rounded to float32, clamped to 448, and rounded to the nearest number, ties to even. NaN stays NaN.
    """
    if dtype == tl.uint8:
        bits = tl.div_rn(entries.to(tl.float32), scale).to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        is_nan = size > 0x7F800000
        size = tl.minimum(size, 0x43E00000)                              # 448
        code = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - 120 * 8   # the bias of the exponent is 7, not 127
        # Below 2 ** -6, numbers are 2 ** -9 apart, as those of float32 are above 16384.
        below = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(is_nan, 127, tl.where(size < 0x3C800000, below, code))
        return (code | ((bits >> 24) & 128)).to(tl.uint8)
    else:
        return entries.to(dtype)


@triton.jit
def widened(entries, dtype: tl.constexpr, HAS_INSTRUCTION: tl.constexpr):
    """Return entries of a pool in `dtype`: the numbers of codes without their scale, or the entries as they are."""
    if entries.dtype == tl.uint8:
        if HAS_INSTRUCTION:
            return entries.to(tl.float8e4nv, bitcast=True).to(dtype)
        else:
            code = entries.to(tl.int32)
            number = ((code & 127) << 20 | (code & 128) << 24).to(tl.float32, bitcast=True) * 2.0**120
            return tl.where((code & 127) == 127, float("nan"), number).to(dtype)
    else:
        return entries


def entries_of(kv_pool, dtype, key_scale, value_scale):
    """Return `kv_pool` as kernels take it: codes in place of e4m3. Another pool must have `dtype`, and scales of 1."""
    if kv_pool.dtype == torch.float8_e4m3fn:
        return kv_pool.view(torch.uint8)
    assert kv_pool.dtype == dtype and key_scale == value_scale == 1.0
    return kv_pool
