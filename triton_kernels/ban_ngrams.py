"""Forbid the tokens that would repeat an n-gram of the sequence.

    t = the first `length` tokens of the row's history, n = size
    logits[t[s+n-1]] = -inf for every s at which t[s .. s+n-2] equals the last n-1 tokens

Shapes      logits                   [R, V]   float32, R rows of V tokens, contiguous rows, any row stride
            history                  [H, C]   int32, contiguous rows, any row stride; ids >= V have no logit
            history_row              [R] int64   row of `history` with the sequence of each row of logits
            length                   [R] int64   number of tokens of the sequence in its row of `history`, at most C
            size                     [R] int32   n; 0: off; 1: forbid all tokens of the sequence
No effect   size 0: the row is unchanged, and its history is not read. history_row and length are then arbitrary
Mutates     logits. NaN stays and +inf becomes NaN, so that a later check still finds them
Oracle      triton_kernels/reference/ban_ngrams.py
Source      the rule is that of fairseq and transformers; written for this project.

One program per row and piece of its history. It compares all starts s in its piece at once.
"""

import triton
import triton.language as tl

BLOCK = 256                             # starts per program


# Slices of the per-row tensors start anywhere: their alignment must not recompile the kernel.
@triton.jit(do_not_specialize_on_alignment=["history_row_ptr", "length_ptr", "size_ptr"])
def _ban_ngrams_kernel(
    logits_ptr, history_ptr, history_row_ptr, length_ptr, size_ptr,
    vocabulary,                         # V
    logits_stride_r, history_stride_h,  # elements from one row to the next
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    size = tl.load(size_ptr + row)
    if size > 0:
        length = tl.load(length_ptr + row).to(tl.int32)
        start = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        tokens_ptr = history_ptr + tl.load(history_row_ptr + row) * history_stride_h
        others = size - 1
        same = start < length - others
        offset = 0
        while (offset < others) & (tl.max(same.to(tl.int32), 0) > 0):
            last = tl.load(tokens_ptr + length - others + offset)
            same = same & (tl.load(tokens_ptr + start + offset, mask=same, other=-1) == last)
            offset += 1
        banned = tl.load(tokens_ptr + start + others, mask=same, other=0)
        banned_ptr, has_logit = logits_ptr + row * logits_stride_r + banned, same & (banned < vocabulary)
        tl.store(banned_ptr, tl.load(banned_ptr, mask=has_logit, other=0.0) - float("inf"), mask=has_logit)


def ban_ngrams(logits, history, history_row, length, size):
    """Set the logits of forbidden tokens to -inf, in place. Returns `logits`. See the module docstring for shapes.

    The kernel also takes time for columns of `history` after the longest length. Pass a view without these columns.
    """
    num_rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 and history.stride(1) == 1
    if num_rows == 0 or history.shape[1] == 0:
        return logits
    _ban_ngrams_kernel[(num_rows, triton.cdiv(history.shape[1], BLOCK))](
        logits, history, history_row, length, size,
        vocabulary, logits.stride(0), history.stride(0),
        BLOCK=BLOCK, num_warps=4,
    )
    return logits
