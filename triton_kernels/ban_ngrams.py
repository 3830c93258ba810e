"""Forbid the tokens that would end an n-gram which the sequence holds already.

    the first `length` tokens t of the row's history, n = size: for every s with t[s .. s+n-2] equal to the last n-1
    tokens, logits[t[s+n-1]] = -inf

Shapes      logits                   [R, V]   float32, contiguous rows, any row stride
            history                  [H, C]   int32, contiguous rows, any row stride; ids of V and more have no logit
            history_row              [R] int64   the row of `history` that belongs to a row of logits
            length                   [R] int64   tokens of it that count, at most C
            size                     [R] int32   n; 0: nothing. 1 forbids whatever the sequence holds
Neutral     a row of size 0 is left as it is, and its history is not looked at: history_row and length may be any
Mutates     logits
Oracle      triton_kernels/reference/ban_ngrams.py
Source      the rule is that of fairseq and transformers; written for this project.

One program is one row and one piece of its history, whose tokens are the starts it tries, all at once.
"""

import triton
import triton.language as tl

BLOCK = 256                             # starts tried together


# Slices of the per-row tensors start anywhere: their alignment must not make a variant of the kernel.
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
        forbidden = tl.full([BLOCK], -float("inf"), tl.float32)
        tl.store(logits_ptr + row * logits_stride_r + banned, forbidden, mask=same & (banned < vocabulary))


def ban_ngrams(logits, history, history_row, length, size):
    """Changes and returns `logits`; see the module's docstring for shapes. Columns after all lengths cost time."""
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
