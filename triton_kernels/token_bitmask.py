"""Forbid the tokens whose bit is not set in a bitmask.

    logits[r, t] = -inf        if bit t % 32 of bitmask[r, t // 32] is 0

Shapes      logits                   [R, V]   any float dtype, contiguous rows, any row stride
            bitmask                  [R, W] int32, W >= V / 32; bit 0 is the lowest; bits of tokens past V are not read
Mutates     logits. Logits of allowed tokens are neither read nor written.
Oracle      triton_kernels/reference/token_bitmask.py
Source      the bitmask layout of xgrammar, llguidance and outlines-core; written for this project.
"""

import triton
import triton.language as tl

BLOCK = 1024                            # tokens per program


@triton.jit
def _token_bitmask_kernel(
    logits_ptr, bitmask_ptr,
    num_tokens,                         # V
    logits_stride_r, bitmask_stride_r,  # elements from one row to the next
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < num_tokens
    word = tl.load(bitmask_ptr + row * bitmask_stride_r + token // 32, mask=inside, other=-1)
    forbidden = ((word >> (token % 32)) & 1) == 0
    nothing = tl.full([BLOCK], -float("inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * logits_stride_r + token, nothing, mask=inside & forbidden)


def token_bitmask(logits, bitmask):
    """Set the logits of forbidden tokens to -inf, in place. See the module docstring for shapes."""
    num_rows, vocabulary = logits.shape
    assert bitmask.shape[0] == num_rows and 32 * bitmask.shape[1] >= vocabulary
    assert logits.stride(1) == bitmask.stride(1) == 1
    if logits.numel() == 0:
        return

    _token_bitmask_kernel[(num_rows, triton.cdiv(vocabulary, BLOCK))](
        logits, bitmask, vocabulary, logits.stride(0), bitmask.stride(0), BLOCK=BLOCK, num_warps=4
    )
