"""Forbid the last token of every word whose other tokens are the last ones of the sequence.

    words = lists[list_start ..] = `count` ends, rising, then the tokens of all words: word w is the tokens
            ends[w-1] .. ends[w] - 1, ends[-1] taken for 0
    a word of n tokens w, and the first `length` tokens t of the row's history:
    where t[length-n+1 ..] equals w[.. n-2], logits[w[n-1]] = -inf. A word of one token is always forbidden.

Shapes      logits                   [R, V]   float32, contiguous rows, any row stride
            history                  [H, C]   int32, contiguous rows, any row stride
            history_row              [R] int64   the row of `history` that belongs to a row of logits
            length                   [R] int64   tokens of it that count, at most C
            lists                    [L] int32   lists of words, as above
            list_start               [R] int32   where the row's list begins
            count                    [R] int32   its words; 0: none
            most                     number >= the largest count
Neutral     the history of a row that has no word, or only words of one token, is not looked at: history_row may be any
Mutates     logits. Ids must be below V.
Oracle      triton_kernels/reference/ban_words.py
Source      TensorRT-LLM's rule and the idea of its packing; written for this project.

One program is one row and a block of its words, compared token by token from the last but one, all words at once.
"""

import triton
import triton.language as tl

BLOCK = 64                              # words compared together


@triton.jit
def begun_words(history_ptr, length, list_ptr, count, first, BLOCK: tl.constexpr):
    """(last token of each word of a block, whether its other tokens are the last ones of the history)."""
    word = first + tl.arange(0, BLOCK)
    there = word < count
    end = tl.load(list_ptr + word, mask=there, other=0)
    begin = tl.load(list_ptr + word - 1, mask=there & (word > 0), other=0)
    size = end - begin
    begun = there & (size - 1 <= length)
    back = 1
    while tl.max((begun & (back < size)).to(tl.int32), 0) > 0:
        compared = begun & (back < size)
        token = tl.load(list_ptr + count + end - 1 - back, mask=compared, other=0)
        held = tl.load(history_ptr + tl.where(compared, length - back, 0), mask=compared, other=0)
        begun = begun & ((token == held) | (back >= size))
        back += 1
    return tl.load(list_ptr + count + end - 1, mask=begun, other=0), begun


# Slices of the per-row tensors start anywhere: their alignment must not make a variant of the kernel.
@triton.jit(do_not_specialize_on_alignment=["history_row_ptr", "length_ptr", "list_start_ptr", "count_ptr"])
def _ban_words_kernel(
    logits_ptr, history_ptr, history_row_ptr, length_ptr, lists_ptr, list_start_ptr, count_ptr,
    logits_stride_r, history_stride_h,  # elements from one row to the next
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    count = tl.load(count_ptr + row)
    if first < count:
        banned, begun = begun_words(
            history_ptr + tl.load(history_row_ptr + row) * history_stride_h, tl.load(length_ptr + row).to(tl.int32),
            lists_ptr + tl.load(list_start_ptr + row), count, first, BLOCK,
        )
        forbidden = tl.full([BLOCK], -float("inf"), tl.float32)
        tl.store(logits_ptr + row * logits_stride_r + banned, forbidden, mask=begun)


def ban_words(logits, history, history_row, length, lists, list_start, count, most):
    """Changes and returns `logits`; see the module's docstring for shapes."""
    num_rows = len(logits)
    assert logits.stride(1) == 1 and history.stride(1) == 1
    if num_rows == 0 or most == 0:
        return logits
    _ban_words_kernel[(num_rows, triton.cdiv(most, BLOCK))](
        logits, history, history_row, length, lists, list_start, count,
        logits.stride(0), history.stride(0),
        BLOCK=BLOCK, num_warps=2,
    )
    return logits
