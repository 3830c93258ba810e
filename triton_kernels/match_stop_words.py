"""Whether the newly sampled token completes a stop word.

    a row ends if (the first `length` tokens of its history, token) ends with a word of its list

Shapes      token                    [R]   any integer dtype: the sampled token of each row
            history                  [H, C]   int32, contiguous rows, any row stride
            history_row              [R] int64   for each row, the row of `history` that has its sequence
            length                   [R] int64   number of tokens before `token`, in the row of `history`, at most C
            lists                    [L] int32   lists of words, as in `ban_words`
            list_start               [R] int32   start of the row's list
            count                    [R] int32   number of words in the row's list
            the result               [R] bool
Unused      history and history_row of a row whose words all have one token; history_row is then arbitrary
Oracle      triton_kernels/reference/match_stop_words.py
Source      TensorRT-LLM's rule; written for this project.

One program per row, which compares BLOCK words of the row's list at a time.
"""

import torch
import triton
import triton.language as tl

from .ban_words import words_lacking_last_token

BLOCK = 64                              # words compared at once


# Slices of the per-row tensors start anywhere: their alignment must not recompile the kernel.
@triton.jit(
    do_not_specialize_on_alignment=[
        "token_ptr", "history_row_ptr", "length_ptr", "list_start_ptr", "count_ptr", "ended_ptr",
    ],
)
def _match_stop_words_kernel(
    token_ptr, history_ptr, history_row_ptr, length_ptr, lists_ptr, list_start_ptr, count_ptr, ended_ptr,
    history_stride_h,                   # elements from one row to the next
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row).to(tl.int32)
    count = tl.load(count_ptr + row)
    length = tl.load(length_ptr + row).to(tl.int32)
    tokens_ptr = history_ptr + tl.load(history_row_ptr + row) * history_stride_h
    list_ptr = lists_ptr + tl.load(list_start_ptr + row)
    ended = tl.zeros([BLOCK], tl.int32)
    for first in range(0, count, BLOCK):
        last, matched = words_lacking_last_token(tokens_ptr, length, list_ptr, count, first, BLOCK)
        ended = ended | (matched & (last == token)).to(tl.int32)
    tl.store(ended_ptr + row, (tl.max(ended, 0) > 0).to(ended_ptr.dtype.element_ty))


def match_stop_words(token, history, history_row, length, lists, list_start, count):
    """Return [R] bool: whether the token of each row completes a stop word. See the module docstring for shapes."""
    ended = torch.empty(len(token), dtype=torch.bool, device=token.device)
    assert history.stride(1) == 1
    if len(token) == 0:
        return ended
    _match_stop_words_kernel[(len(token),)](
        token, history, history_row, length, lists, list_start, count, ended, history.stride(0),
        BLOCK=BLOCK, num_warps=2,
    )
    return ended
