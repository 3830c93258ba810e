"""Philox-4x32-10: four random words from a key and a counter, the same on every machine and in every batch.

    one round   (c0, c1, c2, c3) -> (hi(M1 c2) ^ c1 ^ k0, lo(M1 c2), hi(M0 c0) ^ c3 ^ k1, lo(M0 c0))
    ten rounds; (W0, W1) is added to the key after each

Shapes      key                      [R, 2] int64   words 0 .. 2^32 - 1
            counter                  [R, 4] int64   likewise
            the result               [R, 4] int64   likewise
Oracle      triton_kernels/reference/philox.py
Source      Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011; written for this project.

`uniform` computes a uniform random number of a token: key = (low, high) word of the request's seed, counter =
(position of the sampled token, purpose, number div 4, 0), u = ((word >> 9) + 1/2) * 2^-23 of word number mod 4. So
0 < u < 1, exact in float32. No two purposes share a number: BLOCKS and TOKENS are those of `sample_token`.
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
def philox_uniform(seed, position, purpose: tl.constexpr, number):
    """Return u in (0, 1), float32, for each `number`, a tensor of int32, from an int64 seed and an int32 position."""
    zero = number.to(tl.uint32) ^ number.to(tl.uint32)
    word_0, word_1, word_2, word_3 = philox_words(
        zero + seed.to(tl.uint32), zero + (seed >> 32).to(tl.uint32), zero + position.to(tl.uint32), zero + purpose,
        (number >> 2).to(tl.uint32), zero)
    word = tl.where((number & 2) == 0, tl.where((number & 1) == 0, word_0, word_1),
                    tl.where((number & 1) == 0, word_2, word_3))
    return ((word >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def philox_gumbel(seed, position, purpose: tl.constexpr, number):
    """Return -log(-log(u)), float32, of the numbers of `philox_uniform`."""
    return -tl.log(-tl.log(philox_uniform(seed, position, purpose, number)))


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
def _philox_uniform_kernel(seed_ptr, position_ptr, number_ptr, uniform_ptr, PURPOSE: tl.constexpr):
    row = tl.program_id(0)
    u = philox_uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row), PURPOSE, tl.load(number_ptr + row))
    tl.store(uniform_ptr + row, u)


def philox(key, counter):
    """Return the four words of each key and counter. See the module docstring for shapes."""
    assert key.is_contiguous() and counter.is_contiguous()
    words = torch.empty_like(counter)
    _philox_kernel[(len(counter),)](key, counter, words, num_warps=1)
    return words


def uniform(seed, position, purpose, number):
    """Return u in (0, 1), float32 [R], from `seed` [R] int64 (the bits of an unsigned seed), `position` [R], `purpose`
    (one number), and `number` [R] int32."""
    numbers = torch.empty(len(seed), dtype=torch.float32, device=seed.device)
    _philox_uniform_kernel[(len(seed),)](seed, position, number, numbers, PURPOSE=purpose, num_warps=1)
    return numbers
