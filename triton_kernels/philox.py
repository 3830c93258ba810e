"""Philox-4x32-10: four random words from a key and a counter, the same on every machine and in every batch.

    one round   (c0, c1, c2, c3) -> (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0))
    ten rounds; (W0, W1) is added to the key after each

Shapes      key                      [R, 2] int64   words 0 .. 2^32 - 1
            counter                  [R, 4] int64   likewise
            the result               [R, 4] int64   likewise
Oracle      triton_kernels/reference/philox.py
Source      Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; written for this project.

`uniform` computes the uniform random number of a token: key = (low, high) word of the request's seed, counter =
(position of the sampled token, 0, 0, 0), u = (word 0 >> 8) * 2^-24, so 0 <= u < 1, exact in float32.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def philox_words(k0, k1, c0, c1, c2, c3):
    """Return the four words after ten rounds, for a key (k0, k1) and a counter (c0, c1, c2, c3) of uint32 words."""
    multiplier_0 = tl.full((), 0xD2511F53, tl.uint32)
    multiplier_1 = tl.full((), 0xCD9E8D57, tl.uint32)
    key_step_0 = tl.full((), 0x9E3779B9, tl.uint32)
    key_step_1 = tl.full((), 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high_0 = tl.umulhi(multiplier_0, c0)
        high_1 = tl.umulhi(multiplier_1, c2)
        low_0 = multiplier_0 * c0
        low_1 = multiplier_1 * c2
        c0 = high_1 ^ c1 ^ k0
        c1 = low_1
        c2 = high_0 ^ c3 ^ k1
        c3 = low_0
        k0 = k0 + key_step_0
        k1 = k1 + key_step_1
    return c0, c1, c2, c3


@triton.jit
def philox_uniform(seed, position):
    """Return u in [0, 1), float32, from an int64 seed and an int32 position."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    zero = low ^ low
    word, _, _, _ = philox_words(low, high, position.to(tl.uint32), zero, zero, zero)
    return (word >> 8).to(tl.int32).to(tl.float32) * 5.9604644775390625e-08


@triton.jit
def _philox_kernel(key_ptr, counter_ptr, words_ptr):
    row = tl.program_id(0)
    key_ptr += row * 2
    counter_ptr += row * 4
    words_ptr += row * 4
    c0, c1, c2, c3 = philox_words(
        tl.load(key_ptr).to(tl.uint32), tl.load(key_ptr + 1).to(tl.uint32),
        tl.load(counter_ptr).to(tl.uint32), tl.load(counter_ptr + 1).to(tl.uint32),
        tl.load(counter_ptr + 2).to(tl.uint32), tl.load(counter_ptr + 3).to(tl.uint32),
    )
    tl.store(words_ptr, c0.to(tl.int64))
    tl.store(words_ptr + 1, c1.to(tl.int64))
    tl.store(words_ptr + 2, c2.to(tl.int64))
    tl.store(words_ptr + 3, c3.to(tl.int64))


@triton.jit
def _philox_uniform_kernel(seed_ptr, position_ptr, uniform_ptr):
    row = tl.program_id(0)
    tl.store(uniform_ptr + row, philox_uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row)))


def philox(key, counter):
    """Return the four words of each key and counter. See the module docstring for shapes."""
    assert key.is_contiguous() and counter.is_contiguous()
    words = torch.empty_like(counter)
    _philox_kernel[(len(counter),)](key, counter, words, num_warps=1)
    return words


def uniform(seed, position):
    """Return u in [0, 1), float32 [R], from `seed` [R] int64 (the bits of an unsigned seed) and `position` [R]."""
    numbers = torch.empty(len(seed), dtype=torch.float32, device=seed.device)
    _philox_uniform_kernel[(len(seed),)](seed, position, numbers, num_warps=1)
    return numbers
