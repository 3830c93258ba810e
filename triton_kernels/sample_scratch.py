"""Memory that `sample_token` takes beside its results. Pure arithmetic, so that a memory plan can count it."""

MAX_BLOCK = 4096        # logits of a piece of a row
BUCKETS = 2048          # values of a digit of a logit, 11 bits
LONG = 8                # bytes of an int64


def num_digits(element_size_bytes: int) -> int:
    """Digits of a logit: of 16 bits in a 16-bit dtype, whose floats have no more; three of a float32."""
    return 3 if element_size_bytes == 4 else 2


def num_amounts(digits: int) -> int:
    """Histograms of a row beside the counts of its first digits.

    Of the digits after the first: counts and weights of what may be the last token of top-k. Of all digits: weights
    for top-p.
    """
    return 3 * digits - 2


def scratch_bytes(num_rows: int, vocabulary: int, element_size_bytes: int) -> int:
    """For so many rows of logits, where each of them may be sampled."""
    digits, pieces = num_digits(element_size_bytes), -(-vocabulary // MAX_BLOCK)
    histograms = 4 * BUCKETS + num_amounts(digits) * BUCKETS * LONG
    return num_rows * (histograms + 4 * digits * LONG + 4 * (4 * pieces + 1))
