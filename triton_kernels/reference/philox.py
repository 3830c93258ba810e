"""Philox-4x32-10: four random words from a key and a counter, the same on every machine and in every batch.

    one round   (c0, c1, c2, c3) -> (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0))
    ten rounds; (W0, W1) is added to the key after each

Shapes      key                      [R, 2] int64   words 0 .. 2^32 - 1
            counter                  [R, 4] int64   likewise
            the result               [R, 4] int64   likewise
Source      Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011. Exact: checked against the
            known-answer vectors published with it.

`uniform` computes a uniform random number of a token: key = (low, high) word of the request's seed, counter =
(position of the sampled token, purpose, number div 4, 0), u = ((word >> 9) + 1/2) * 2^-23 of word number mod 4. So
0 < u < 1, exact in float32. No two purposes share a number: BLOCKS and TOKENS are those of `sample_token`, the others
those of a test by ratios.
"""

import torch

MULTIPLIER_0, MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
KEY_STEP_0, KEY_STEP_1 = 0x9E3779B9, 0xBB67AE85
WORD = 0xFFFFFFFF
BLOCKS, TOKENS = 1, 2             # purposes
ACCEPTANCE, REST_BLOCKS, REST_TOKENS = 3, 4, 5     # purposes of decoding/acceptance.py


def _multiply(constant: int, words):
    """Return the (high, low) 32-bit words of constant * words, computed in int64 without overflow."""
    low_part, high_part = constant * (words & 0xFFFF), constant * (words >> 16)      # each below 2^48
    middle = high_part + (low_part >> 16)
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low_part & 0xFFFF)


def philox(key, counter):
    """Return the four words of each key and counter. See the module docstring for shapes."""
    k0, k1 = key.unbind(1)
    c0, c1, c2, c3 = counter.unbind(1)
    for _ in range(10):
        high_0, low_0 = _multiply(MULTIPLIER_0, c0)
        high_1, low_1 = _multiply(MULTIPLIER_1, c2)
        c0, c1, c2, c3 = high_1 ^ c1 ^ k0, low_1, high_0 ^ c3 ^ k1, low_0
        k0, k1 = (k0 + KEY_STEP_0) & WORD, (k1 + KEY_STEP_1) & WORD
    return torch.stack([c0, c1, c2, c3], dim=1)


def uniform(seed, position, purpose, number):
    """Return u in (0, 1), float32 [R], from `seed` [R] int64 (the bits of an unsigned seed), `position` [R], `purpose`
    (one number), and `number` [R]."""
    key = torch.stack([seed & WORD, (seed >> 32) & WORD], dim=1)
    zero = torch.zeros_like(seed)
    counter = torch.stack([position.to(torch.int64) & WORD, zero + purpose, zero + number // 4, zero], dim=1)
    word = philox(key, counter).gather(1, zero[:, None] + (number % 4)[:, None])[:, 0]
    return ((word >> 9).double() + 0.5).float() * 2.0**-23
