"""Put the parts of a split attention together.

    out[s, h] = sum_i w_i * partial_out[s, h, i],   w_i = 2^lse_i / sum_j 2^lse_j,   lse = partial_lse[s, h]

Shapes      partial_out              [S, HQ, P, D] float32   P parts, each normalised by its own sum
            partial_lse              [S, HQ, P] float32   base-2 logarithm of that sum; -inf = empty part, whose
                                                          partial_out is never looked at
            out                      [S, HQ, D]
Mutates     out. Where all parts are empty it is zero.
Oracle      triton_kernels/reference/paged_attention_merge.py
Source      split-KV attention (Flash-Decoding, Dao et al. 2023); written for this project.
"""

import triton
import triton.language as tl

from .strides import heads_contiguous


@triton.jit
def _merge_kernel(
    partial_out_ptr, partial_lse_ptr, out_ptr,
    out_stride_s,                       # elements from one sequence to the next
    HQ: tl.constexpr, D: tl.constexpr, D_POW2: tl.constexpr,
    PARTS: tl.constexpr, PARTS_POW2: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.arange(0, PARTS_POW2)
    lane = tl.arange(0, D_POW2)
    first = (sequence * HQ + head) * PARTS

    lse = tl.load(partial_lse_ptr + first + part, mask=part < PARTS, other=-float("inf"))
    filled = lse > -float("inf")
    top = tl.max(lse, 0)
    weight = tl.where(filled, tl.exp2(lse - top), 0.0)                 # never -inf minus -inf
    weight = weight / tl.maximum(tl.sum(weight, 0), 1e-30)

    parts = tl.load(
        partial_out_ptr + (first + part)[:, None] * D + lane[None, :],
        mask=filled[:, None] & (lane < D)[None, :], other=0.0,         # an empty part was never written
    )
    merged = tl.sum(parts * weight[:, None], 0)
    tl.store(out_ptr + sequence * out_stride_s + head * D + lane, merged.to(out_ptr.dtype.element_ty), mask=lane < D)


def paged_attention_merge(partial_out, partial_lse, out):
    """Weighted mean of the parts; see the module's docstring for shapes. Returns out."""
    num_sequences, num_heads, parts, head_size = partial_out.shape
    assert partial_out.is_contiguous() and partial_lse.is_contiguous() and heads_contiguous(out)
    if num_sequences == 0:
        return out

    _merge_kernel[(num_sequences, num_heads)](
        partial_out, partial_lse, out, out.stride(0),
        HQ=num_heads, D=head_size, D_POW2=triton.next_power_of_2(head_size),
        PARTS=parts, PARTS_POW2=triton.next_power_of_2(parts),
        num_warps=2,
    )
    return out
