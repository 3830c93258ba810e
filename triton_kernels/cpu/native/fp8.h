/* Keys and values in FP8: e4m3, a sign, 4 bits of exponent and 3 of mantissa. Its numbers are exact in bfloat16. */
#pragma once
#include "vectors.h"

typedef uint8_t octets __attribute__((vector_size(LANES), aligned(1)));

#define LARGEST_FP8 0x43e00000        /* 448.0f */
#define SMALLEST_NORMAL_FP8 0x3c800000
#define FP8_NAN 127

INLINE words chosen(words yes, words no, integers condition) {
    return (yes & (words)condition) | (no & ~(words)condition);
}

/* Round to e4m3: nearest, ties to even; numbers above 448 become 448; NaN stays NaN. */
INLINE octets narrow_to_fp8(floats wide) {
    words bits = (words)wide, size = bits & 0x7fffffff;
    integers is_nan = size > 0x7f800000;
    size = chosen(size, (words){} + LARGEST_FP8, size < LARGEST_FP8);
    words normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120 << 3);
    words small = (words)((floats)size + 0x1p14f) - 0x46800000;      /* a sum near 2^14 is a multiple of 2^-9 */
    words code = chosen(small, normal, size < SMALLEST_NORMAL_FP8) | ((words)is_nan & FP8_NAN);
    return __builtin_convertvector(code | (bits >> 24 & 128), octets);
}

INLINE floats widen_fp8(octets codes) {
#if LANES == 8
    words code = (words)_mm256_cvtepu8_epi32(_mm_set1_epi64x((int64_t)codes));
#else
    words code = __builtin_convertvector(codes, words);
#endif
    words size = code & 127, normal = (size << 20) + (120 << 23);
    words small = (words)((floats)(size << 20 | 121 << 23) - 0x1p-6f);
    words bits = chosen(small, normal, size < 8) | ((words)(size == FP8_NAN) & 0x7fc00000);
    return (floats)(bits | (code & 128) << 24);
}

/* to[i] = from[i] / scale in e4m3. The quotient is rounded to float32 first. */
INLINE void narrow_row_to_fp8(const void *from, uint8_t *to, int64_t size, float scale, int type) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) *(octets *)(to + i) = narrow_to_fp8(load(from, i, type) / scale);
    for (; i < size; i++) to[i] = narrow_to_fp8(all(load_one(from, i, type) / scale))[0];
}

/* Widen `count` numbers, a multiple of LANES. */
INLINE void widen_row_of_fp8(const uint8_t *from, void *to, int64_t count, int type) {
    int64_t i = 0;
#if defined(__AVX512BW__)
    /* Half a byte selects each byte of the result: the lower one of a code for its mantissa, the upper one for its sign
       and exponent. The codes without the exponent, which are small, have a table of their own. */
#define FOUR_TIMES(...) _mm512_broadcast_i32x4(_mm_setr_epi8(__VA_ARGS__))
    const __m512i upper = FOUR_TIMES(0x3c, 0x3d, 0x3e, 0x3f, 0x40, 0x41, 0x42, 0x43,
                                     -0x44, -0x43, -0x42, -0x41, -0x40, -0x3f, -0x3e, -0x3d);
    const __m512i small_upper = FOUR_TIMES(0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i small_lower = FOUR_TIMES(0, 0, -0x80, -0x40, 0, 0x20, 0x40, 0x60, 0, 0, 0, 0, 0, 0, 0, 0);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), half = _mm512_set1_epi8(15);
    const __m512i sign = _mm512_set1_epi8(-128), exponent = _mm512_set1_epi8(0x78), ones = _mm512_set1_epi8(-1);
    for (; type == BFLOAT16 && i + 64 <= count; i += 64) {
        __m512i code = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from + i));
        __m512i low = _mm512_and_si512(code, half), high = _mm512_and_si512(_mm512_srli_epi16(code, 4), half);
        __mmask64 is_small = _mm512_testn_epi8_mask(code, exponent);
        __m512i first = _mm512_mask_shuffle_epi8(_mm512_slli_epi16(low, 4), is_small, small_lower, low);
        __m512i second = _mm512_shuffle_epi8(upper, high);
        __m512i signs = _mm512_and_si512(code, sign);
        second = _mm512_mask_mov_epi8(second, is_small, _mm512_or_si512(_mm512_shuffle_epi8(small_upper, low), signs));
        __mmask64 is_nan = _mm512_cmpeq_epi8_mask(_mm512_or_si512(code, sign), ones);
        second = _mm512_mask_mov_epi8(second, is_nan, _mm512_or_si512(signs, _mm512_set1_epi8(0x7f)));
        _mm512_storeu_si512((char *)to + 2 * i, _mm512_unpacklo_epi8(first, second));
        _mm512_storeu_si512((char *)to + 2 * i + 64, _mm512_unpackhi_epi8(first, second));
    }
#undef FOUR_TIMES
#endif
    for (; i < count; i += LANES) store(to, i, widen_fp8(*(const octets *)(from + i)), type);
}
