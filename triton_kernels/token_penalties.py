"""Make the tokens that a sequence holds less likely, or more.

    n(id) = how often `id` is among the first `length` tokens of the row's history
    x     = logits[id], wherever n(id) > 0
    x     = x * repetition where x < 0, else x / repetition
    m(id) = how often `id` is among those from token `ignored` on
    x     = x - (presence where m(id) > 0) - frequency * m(id)

Shapes      logits                   [R, V]   float32, contiguous rows, any row stride
            history                  [H, C]   int32, contiguous rows, any row stride; ids of V and more have no logit
            history_row              [R] int64   the row of `history` that belongs to a row of logits
            length                   [R] int64   tokens of it that count, at most C
            repetition               [R] float32   above 0; 1: nothing
            presence, frequency      [R] float32   0: nothing
            ignored                  [R] int32   leading tokens that presence and frequency do not count, 0..length
Neutral     a row with 1, 0 and 0 is left as it is, and its history is not looked at: history_row and length may be any
Mutates     logits. What was finite stays finite: it ends at the largest float32. What was not stays as it is.
Oracle      triton_kernels/reference/token_penalties.py
Source      the repetition penalty is that of CTRL (Keskar et al., 2019); written for this project.

One program is one row and one piece of the vocabulary: it counts the history's tokens in its piece and touches the
logits that occur. So nothing of the size of the vocabulary is kept between steps.
"""

import triton
import triton.language as tl

MAX_BLOCK = 2048                        # ids counted together
CHUNK = 512                             # tokens of the history read together
LARGEST = tl.constexpr(3.4028234663852886e38)


# Slices of the per-row tensors start anywhere: their alignment must not make a variant of the kernel.
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
    """How often each id of this piece of the vocabulary is among the tokens begin..end."""
    counts = tl.zeros([BLOCK], tl.int32)
    for start in range(begin, end, CHUNK):
        place = start + tl.arange(0, CHUNK)
        token = tl.load(tokens_ptr + place, mask=place < end, other=-1)
        here = (token >= first) & (token < first + BLOCK)
        counts += tl.histogram(tl.where(here, token - first, 0), BLOCK, mask=here)
    return counts


def token_penalties(logits, history, history_row, length, repetition, presence, frequency, ignored):
    """Changes and returns `logits`; see the module's docstring for shapes."""
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
