"""Computes the size of the scratch memory of `sample_token`, without importing triton, for the memory plan.

`sample_token` finds the thresholds of top-k and top-p by radix selection: it divides each logit into digits.
"""

MAX_PIECE = 4096        # logits of a piece of a row
MAX_BLOCK = 64          # logits of a block, of which the draw chooses one first
BUCKETS = 2048          # values of a digit of 11 bits
LONG = 8                # bytes of an int64


def num_digits(element_size_bytes: int) -> int:
    """Return the number of digits into which a logit is divided: 2 for 16-bit dtypes, 3 for float32."""
    return 3 if element_size_bytes == 4 else 2


def num_histograms(digits: int) -> int:
    """Return the number of 64-bit histograms for a row whose logits are divided into `digits` digits each.

    Top-k needs two histograms, of counts and of weights, for each digit after the first. Top-p needs one, of weights,
    for each digit. The counts of the first digit are not included: they are a separate 32-bit array.
    """
    return 3 * digits - 2


def scratch_bytes(num_rows: int, vocabulary: int, element_size_bytes: int) -> int:
    """Return the bytes of scratch memory for `num_rows` rows of logits that may be sampled at random."""
    digits, pieces = num_digits(element_size_bytes), -(-vocabulary // MAX_PIECE)
    histograms = 4 * BUCKETS + num_histograms(digits) * BUCKETS * LONG
    return num_rows * (histograms + 4 * digits * LONG + 4 * (5 * pieces + 1))
