"""Combine the partial results of a split attention.

    out[s, h] = sum_i w_i * partial_out[i, h],   w_i = 2^lse_i / sum_j 2^lse_j,   lse = partial_lse[:, h]
    over the partial results i = part_starts[s] .. part_starts[s + 1] - 1 of sequence s

Shapes      partial_out              [P, HQ, D] float32   P partial results of HQ heads, each normalized by its own sum
                                                          of weights; rows that belong to no sequence are not read
            partial_lse              [P, HQ] float32   base-2 logarithm of this sum
            part_starts              [S + 1] int32   ascending
            out                      [S, HQ, D]
            merged_rows              [S] int32   row of out for each sequence s; out may then have any number of rows.
                                                  None: row s
Needs       for each sequence with partial results, and each head, at least one partial_lse above -inf. Partial results
            with -inf are ignored.
Mutates     out, except for sequences without partial results.
Oracle      triton_kernels/reference/paged_attention_merge.py
Source      split-KV attention (Flash-Decoding, Dao et al. 2023); written for this project.

One program per head and sequence. It adds the partial results one by one, in their order, to a running softmax, and
requests PARTS of them at once. `paged_attention_context` adds the partial results that it keeps in registers with the
same function, so both give the same bits: all that a compiler could combine in several ways is written as a fused
multiply-add. The kernel reads the number of partial results from device memory, so it is not recompiled when that
number changes. For contexts, what is called a sequence here is a token whose keys were split.
"""

import triton
import triton.language as tl

from .strides import heads_contiguous

PARTS = 8                               # partial results requested at once


@triton.jit
def added(top, total, merged, lse, result):
    """Return the running softmax (top, total, merged) of some rows, with one more partial result of each row.

    top, lse [R]   -inf: nothing so far, or a partial result without a key, which changes no bit
    total [R]
    merged, result [R, D]
    """
    new_top = tl.maximum(top, lse)
    pivot = tl.where(new_top > -float("inf"), new_top, 0.0)             # no key so far: avoid -inf + inf
    shrink = tl.exp2(top - pivot)
    weight = tl.exp2(lse - pivot)
    total = tl.fma(total, shrink, weight)
    merged = tl.fma(merged, tl.broadcast_to(shrink[:, None], merged.shape), result * weight[:, None])
    return new_top, total, merged


@triton.jit
def quotient(total, merged):
    """Return merged / total; zeros for rows without a key. One exactly rounded quotient for each row is a factor."""
    return merged * tl.div_rn(1.0, tl.where(total > 0.0, total, 1.0))[:, None]


@triton.jit
def combined(
    partial_out_ptr, partial_lse_ptr, begin, end, first_head,
    HQ: tl.constexpr, HEADS: tl.constexpr, HEADS_POW2: tl.constexpr, D: tl.constexpr, D_POW2: tl.constexpr,
    PARTS: tl.constexpr,                # partial results requested at once
):
    """Return [HEADS_POW2, D_POW2]: heads from `first_head` on, combined from the partial results begin .. end - 1.

    The loads leave out the L1 cache, which may hold entries of an earlier launch.
    """
    member = tl.arange(0, HEADS_POW2)
    lane = tl.arange(0, D_POW2)[None, :]
    top = tl.full([HEADS_POW2], -float("inf"), tl.float32)
    total = tl.zeros([HEADS_POW2], tl.float32)
    merged = tl.zeros([HEADS_POW2, D_POW2], tl.float32)
    for first in tl.range(begin, end, PARTS, num_stages=1):
        lses = ()
        results = ()
        for offset in tl.static_range(PARTS):              # loads first: several are in flight together
            part = tl.zeros([HEADS_POW2], tl.int64) + (first + offset)
            inside = (part < end) & (member < HEADS)
            row = part * HQ + first_head + member
            lse = tl.load(partial_lse_ptr + row, mask=inside, other=-float("inf"), cache_modifier=".cg")
            result = tl.load(
                partial_out_ptr + row[:, None] * D + lane, mask=inside[:, None] & (lane < D), other=0.0,
                cache_modifier=".cg",
            )
            lses += (lse,)
            results += (result,)
        for offset in tl.static_range(PARTS):
            top, total, merged = added(top, total, merged, lses[offset], results[offset])
    return quotient(total, merged)


# Starts and rows are slices of the step's index tensor: their alignment must not recompile the kernel.
@triton.jit(do_not_specialize_on_alignment=["part_start_ptr", "merged_row_ptr"])
def _merge_kernel(
    partial_out_ptr, partial_lse_ptr, part_start_ptr, merged_row_ptr, out_ptr,
    out_stride_s,                       # elements from one sequence to the next
    HQ: tl.constexpr, D: tl.constexpr, D_POW2: tl.constexpr, PARTS: tl.constexpr, HAS_ROWS: tl.constexpr,
):
    sequence = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    begin = tl.load(part_start_ptr + sequence)
    end = tl.load(part_start_ptr + sequence + 1)
    if begin == end:                    # not split: the attention kernel has written the result
        return
    out_row = sequence
    if HAS_ROWS:
        out_row = tl.load(merged_row_ptr + sequence).to(tl.int64)

    result = combined(partial_out_ptr, partial_lse_ptr, begin, end, head, HQ, 1, 1, D, D_POW2, PARTS)
    lane = tl.arange(0, D_POW2)[None, :]
    tl.store(out_ptr + out_row * out_stride_s + head * D + lane, result.to(out_ptr.dtype.element_ty), mask=lane < D)


def paged_attention_merge(partial_out, partial_lse, part_starts, out, merged_rows=None):
    """Combine the partial results of each sequence. Returns out. See the module docstring for shapes."""
    num_heads, head_size = partial_out.shape[1:]
    assert partial_out.is_contiguous() and partial_lse.is_contiguous() and heads_contiguous(out)
    assert part_starts.is_contiguous() and (merged_rows is None or merged_rows.is_contiguous())
    num_sequences = len(out) if merged_rows is None else len(merged_rows)
    if num_sequences == 0:
        return out

    _merge_kernel[(num_sequences, num_heads)](
        partial_out, partial_lse, part_starts, merged_rows, out, out.stride(0),
        HQ=num_heads, D=head_size, D_POW2=triton.next_power_of_2(head_size), PARTS=PARTS,
        HAS_ROWS=merged_rows is not None, num_warps=2,
    )
    return out
