"""Combine the partial results of a split attention.

    out[s, h] = sum_i w_i * partial_out[i, h],   w_i = 2^lse_i / sum_j 2^lse_j,   lse = partial_lse[:, h]
    over the partial results i = part_starts[s] .. part_starts[s + 1] - 1 of sequence s

Shapes      partial_out              [P, HQ, D] float32   P partial results of HQ heads, each normalized by its own sum
                                                          of weights; rows that belong to no sequence are not read
            partial_lse              [P, HQ] float32   base-2 logarithm of this sum
            part_starts              [S + 1] int32   ascending
            out                      [S, HQ, D]
Mutates     out, except for sequences without partial results.
Oracle      triton_kernels/reference/paged_attention_merge.py
Source      split-KV attention (Flash-Decoding, Dao et al. 2023); written for this project.

One program per head and sequence. It reads the partial results 16 at a time and keeps a running softmax. The kernel
reads the number of partial results from device memory, so it is not recompiled when that number changes.
"""

import triton
import triton.language as tl

from .strides import heads_contiguous

PARTS = 16                              # partial results read at once


# The starts are a slice of the step's index tensor: their alignment must not recompile the kernel.
@triton.jit(do_not_specialize_on_alignment=["part_start_ptr"])
def _merge_kernel(
    partial_out_ptr, partial_lse_ptr, part_start_ptr, out_ptr,
    out_stride_s,                       # elements from one sequence to the next
    HQ: tl.constexpr, D: tl.constexpr, D_POW2: tl.constexpr, PARTS: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(part_start_ptr + sequence)
    end = tl.load(part_start_ptr + sequence + 1)
    if begin == end:                    # not split: the decode kernel has written the result
        return

    lane = tl.arange(0, D_POW2)
    top = tl.full((), -float("inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    merged = tl.zeros([D_POW2], tl.float32)
    for first in range(begin, end, PARTS):
        part = first + tl.arange(0, PARTS)
        inside = part < end
        row = part.to(tl.int64) * HQ + head
        lse = tl.load(partial_lse_ptr + row, mask=inside, other=-float("inf"))
        parts = tl.load(
            partial_out_ptr + row[:, None] * D + lane[None, :], mask=inside[:, None] & (lane < D)[None, :], other=0.0
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        weight = tl.exp2(lse - new_top)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 0)
        merged = merged * shrink + tl.sum(parts * weight[:, None], 0)
        top = new_top
    result = (merged / total).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + sequence * out_stride_s + head * D + lane, result, mask=lane < D)


def paged_attention_merge(partial_out, partial_lse, part_starts, out):
    """Combine the partial results of each sequence. Returns out. See the module docstring for shapes."""
    num_heads, head_size = partial_out.shape[1:]
    assert partial_out.is_contiguous() and partial_lse.is_contiguous() and heads_contiguous(out)
    assert part_starts.is_contiguous()
    if len(out) == 0:
        return out

    _merge_kernel[(len(out), num_heads)](
        partial_out, partial_lse, part_starts, out, out.stride(0),
        HQ=num_heads, D=head_size, D_POW2=triton.next_power_of_2(head_size), PARTS=PARTS,
        num_warps=2,
    )
    return out
