"""Repetition, presence and frequency penalties of the tokens of a sequence.

    n(id) = number of occurrences of `id` in the first `length` tokens of the row's history
    x     = logits[id], for all ids with n(id) > 0
    x     = x * repetition if x < 0, else x / repetition
    m(id) = number of those occurrences from token `ignored` on
    x     = x - (presence if m(id) > 0) - frequency * m(id)

Shapes      logits                   [R, V]   float32, R rows of V tokens, contiguous rows, any row stride
            history                  [H, C]   int32, contiguous rows, any row stride; ids >= V have no logit
            history_row              [R] int64   row of `history` with the sequence of each row of logits
            length                   [R] int64   number of tokens of the sequence in its row of `history`, at most C
            repetition               [R] float32   above 0; 1: off
            presence, frequency      [R] float32   0: off
            ignored                  [R] int32   number of leading tokens that presence and frequency ignore, 0..length
Unused      history, history_row and length of a row with repetition 1, presence 0 and frequency 0. The row is
            unchanged; history_row and length are then arbitrary
Mutates     logits. Finite logits stay finite: they saturate at the largest float32. NaN and infinite logits are
            unchanged.
Oracle      triton_kernels/reference/token_penalties.py
Source      the repetition penalty is that of CTRL (Keskar et al., 2019); written for this project.

One program per row and piece of the vocabulary. It counts the tokens of the history that fall into its piece and
changes their logits. No state of the size of the vocabulary is kept between steps.
"""

import triton
import triton.language as tl

MAX_BLOCK = 2048                        # ids per program
CHUNK = 512                             # tokens of the history read at once
LARGEST = tl.constexpr(3.4028234663852886e38)


# Slices of the per-row tensors start anywhere: their alignment must not recompile the kernel.
@triton.jit(
    do_not_specialize_on_alignment=[
        "history_row_ptr", "length_ptr", "repetition_ptr", "presence_ptr", "frequency_ptr",
        "ignored_ptr",
    ],
)
def _token_penalties_kernel(
    logits_ptr, history_ptr, history_row_ptr, length_ptr, repetition_ptr, presence_ptr, frequency_ptr,
    ignored_ptr,
    vocabulary,                         # V
    logits_stride_r, history_stride_h,  # elements from one row to the next
    BLOCK: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * BLOCK
    repetition = tl.load(repetition_ptr + row)
    presence = tl.load(presence_ptr + row)
    frequency = tl.load(frequency_ptr + row)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        length = tl.load(length_ptr + row).to(tl.int32)
        tokens_ptr = history_ptr + tl.load(history_row_ptr + row) * history_stride_h
        ignored = tl.load(ignored_ptr + row).to(tl.int32)
        not_counted = _counts(tokens_ptr, 0, ignored, first, BLOCK, CHUNK)
        counts = _counts(tokens_ptr, ignored, length, first, BLOCK, CHUNK)

        token = first + tl.arange(0, BLOCK)
        seen = (not_counted + counts > 0) & (token < vocabulary)
        logit_ptr = logits_ptr + row * logits_stride_r + token
        before = tl.load(logit_ptr, mask=seen, other=0.0)
        x = tl.where(before < 0.0, before * repetition, tl.div_rn(before, repetition))
        x = x - tl.where(counts > 0, presence, 0.0) - frequency * counts.to(tl.float32)
        x = tl.where(x != x, -LARGEST, tl.minimum(tl.maximum(x, -LARGEST), LARGEST))
        was_finite = tl.abs(before) <= LARGEST
        tl.store(logit_ptr, tl.where(was_finite, x, before), mask=seen)


@triton.jit
def _counts(tokens_ptr, begin, end, first, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """Return how often each of the BLOCK ids from `first` on occurs in the tokens begin .. end - 1."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, CHUNK):
        index = start + tl.arange(0, CHUNK)
        token = tl.load(tokens_ptr + index, mask=index < end, other=-1)
        here = (token >= first) & (token < first + BLOCK)
        counts += tl.histogram(tl.where(here, token - first, 0), BLOCK, mask=here)
    return counts


def token_penalties(logits, history, history_row, length, repetition, presence, frequency, ignored):
    """Apply the penalties to `logits`, in place, and return `logits`. See the module docstring for shapes."""
    num_rows, vocabulary = logits.shape
    assert logits.stride(1) == 1 and history.stride(1) == 1
    if num_rows == 0:
        return logits
    block = min(MAX_BLOCK, triton.next_power_of_2(vocabulary))
    _token_penalties_kernel[(num_rows, triton.cdiv(vocabulary, block))](
        logits, history, history_row, length, repetition, presence, frequency, ignored,
        vocabulary, logits.stride(0), history.stride(0),
        BLOCK=block, CHUNK=CHUNK, num_warps=4,
    )
    return logits
