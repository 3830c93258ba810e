"""Forbid the last token of every word whose other tokens are the last tokens of the sequence.

    words = the list that starts at lists[list_start]: first the `count` numbers ends[0], ends[1], ..., ascending, then
            the tokens of all words. Word i has the tokens ends[i-1] .. ends[i] - 1, and word 0 begins with token 0
    t     = the first `length` tokens of the row's history
    logits[w[n-1]] = -inf for every word w of n tokens with t[length-n+1 ..] equal to w[.. n-2]. A word of one token is
    always forbidden.

Shapes      logits                   [R, V]   float32, R rows of V tokens, contiguous rows, any row stride
            history                  [H, C]   int32, contiguous rows, any row stride
            history_row              [R] int64   row of `history` with the sequence of each row of logits
            length                   [R] int64   number of tokens of the sequence in its row of `history`, at most C
            lists                    [L] int32   lists of words, as above
            list_start               [R] int32   start of the row's list
            count                    [R] int32   number of words in the row's list
            max_count                at least the largest count
Unused      history and history_row of a row whose words all have one token; history_row is then arbitrary
Mutates     logits. NaN stays and +inf becomes NaN, so that a later check still finds them. The tokens of all words must
            be below V.
Oracle      triton_kernels/reference/ban_words.py
Source      TensorRT-LLM's rule and the idea of its packing; written for this project.

One program per row and block of its words. It compares all words of the block at once, token by token, backward from
the next-to-last token.
"""

import triton
import triton.language as tl

BLOCK = 64                              # words per program


@triton.jit
def words_lacking_last_token(history_ptr, length, list_ptr, count, first, BLOCK: tl.constexpr):
    """Return (last token, whether the history ends with the other tokens) of each of the BLOCK words from `first` on.

    The last token is 0 where the second result is false, such as past the end of the list.
    """
    word = first + tl.arange(0, BLOCK)
    there = word < count
    end = tl.load(list_ptr + word, mask=there, other=0)
    begin = tl.load(list_ptr + word - 1, mask=there & (word > 0), other=0)
    size = end - begin
    matched = there & (size - 1 <= length)
    back = 1
    while tl.max((matched & (back < size)).to(tl.int32), 0) > 0:
        compared = matched & (back < size)
        token = tl.load(list_ptr + count + end - 1 - back, mask=compared, other=0)
        held = tl.load(history_ptr + tl.where(compared, length - back, 0), mask=compared, other=0)
        matched = matched & ((token == held) | (back >= size))
        back += 1
    return tl.load(list_ptr + count + end - 1, mask=matched, other=0), matched


# Slices of the per-row tensors start anywhere: their alignment must not recompile the kernel.
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
        banned, matched = words_lacking_last_token(
            history_ptr + tl.load(history_row_ptr + row) * history_stride_h, tl.load(length_ptr + row).to(tl.int32),
            lists_ptr + tl.load(list_start_ptr + row), count, first, BLOCK,
        )
        banned_ptr = logits_ptr + row * logits_stride_r + banned
        tl.store(banned_ptr, tl.load(banned_ptr, mask=matched, other=0.0) - float("inf"), mask=matched)


def ban_words(logits, history, history_row, length, lists, list_start, count, max_count):
    """Set the logits of forbidden tokens to -inf, in place. Returns `logits`. See the module docstring for shapes."""
    num_rows = len(logits)
    assert logits.stride(1) == 1 and history.stride(1) == 1
    if num_rows == 0 or max_count == 0:
        return logits
    _ban_words_kernel[(num_rows, triton.cdiv(max_count, BLOCK))](
        logits, history, history_row, length, lists, list_start, count,
        logits.stride(0), history.stride(0),
        BLOCK=BLOCK, num_warps=2,
    )
    return logits
