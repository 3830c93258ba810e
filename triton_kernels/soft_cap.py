"""Scale and soft cap of scores in both attention kernels, whose softmax uses powers of two.

    without a cap    2^(score * score_factor - top),   score_factor = scale * log2(e)
    with a cap       2^(capped - top),                 capped = CAP_LOG2 * tanh(score * scale / softcap)
                                                       CAP_LOG2 = softcap * log2(e)
    top is the largest value so far of score * score_factor, or of capped, in the row
"""

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634


@triton.jit
def soft_cap(doubled, CAP_LOG2: tl.constexpr):
    """Return CAP_LOG2 * tanh(x) for `doubled` = 2 * log2(e) * x, where CAP_LOG2 = softcap * log2(e).

    If 2^doubled overflows or underflows, the result is CAP_LOG2 or -CAP_LOG2.
    """
    return CAP_LOG2 - 2.0 * CAP_LOG2 / (1.0 + tl.exp2(doubled))


def score_factors(scale, softcap):
    """Return (factor by which a kernel multiplies each score, softcap * log2(e)).

    With a cap, the kernel passes the multiplied score to `soft_cap`. Without a cap, the second number is 0.
    """
    assert scale > 0 and (softcap is None or softcap > 0)
    if softcap is None:
        return scale * LOG2_E, 0.0
    return 2 * scale * LOG2_E / softcap, softcap * LOG2_E
