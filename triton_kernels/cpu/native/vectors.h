/* Vectors of LANES floats, with the vector extensions of GCC and Clang. A vector fills one register: sixteen floats
   with AVX-512, eight with AVX2, four with SSE or NEON. GCC keeps wider vectors in memory, which takes thirty times as
   long. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define LINE_BYTES 64
#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t integers __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint32_t words __attribute__((vector_size(4 * LANES), aligned(4)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2)));

/* Data types, numbered as in Python. */
enum { FLOAT32 = 0, BFLOAT16 = 1, HALF = 2, FP8 = 3 };    /* HALF: of scales, see quantised.h. FP8: of caches */
INLINE int64_t bytes_of(int type) { return type == FLOAT32 ? 4 : type == FP8 ? 1 : 2; }

/* Prefetch a cache line. Invalid addresses are ignored. */
INLINE void prefetch(const void *line) { __builtin_prefetch(line); }
/* Prefetch a line that is read later, to a farther cache level. */
INLINE void prefetch_soon(const void *line) { __builtin_prefetch(line, 0, 2); }

INLINE floats all(float value) { return (floats){} + value; }
INLINE integers all_integers(int32_t value) { return (integers){} + value; }

/* 0, 1, 2, ... */
#if LANES == 16
#define FIRST_INTEGERS ((integers){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif LANES == 8
#define FIRST_INTEGERS ((integers){0, 1, 2, 3, 4, 5, 6, 7})
#else
#define FIRST_INTEGERS ((integers){0, 1, 2, 3})
#endif

/* a * b + c, rounded once. */
INLINE floats fused(floats a, floats b, floats c) {
#if LANES == 16
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    for (int lane = 0; lane < LANES; lane++) c[lane] = fmaf(a[lane], b[lane], c[lane]);
    return c;
#endif
}

INLINE floats widen(halves narrow) {
#if LANES == 8
    return (floats)((words)_mm256_cvtepu16_epi32((__m128i)narrow) << 16);    /* GCC takes five instructions for it */
#else
    return (floats)(__builtin_convertvector(narrow, words) << 16);
#endif
}

/* Round to bfloat16: nearest, ties to even; NaN stays NaN. */
INLINE halves narrow(floats wide) {
#if defined(__AVX512BF16__)
    return (halves)_mm512_cvtneps_pbh((__m512)wide);
#else
    words bits = (words)wide;
    words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    words is_nan = (words)(wide != wide);
    return __builtin_convertvector((rounded & ~is_nan) | (((bits >> 16) | 0x40) & is_nan), halves);
#endif
}

INLINE floats load(const void *row, int64_t index, int type) {
    if (type == FLOAT32) return *(const floats *)((const float *)row + index);
    return widen(*(const halves *)((const uint16_t *)row + index));
}

INLINE void store(void *row, int64_t index, floats values, int type) {
    if (type == FLOAT32) *(floats *)((float *)row + index) = values;
    else *(halves *)((uint16_t *)row + index) = narrow(values);
}

INLINE float load_one(const void *row, int64_t index, int type) {
    if (type == FLOAT32) return ((const float *)row)[index];
    uint32_t bits = (uint32_t)((const uint16_t *)row)[index] << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE void store_one(void *row, int64_t index, float value, int type) {
    if (type == FLOAT32) ((float *)row)[index] = value;
    else ((uint16_t *)row)[index] = narrow(all(value))[0];
}

/* Return sums + the dot product of two bfloat16 numbers with each of LANES pairs. */
#if defined(__AVX512BF16__)
INLINE floats add_pairs(floats sums, uint32_t two, words pairs) {
    return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32((int)two), (__m512bh)pairs);
}
#else
/* The first and the second bfloat16 of each pair. */
INLINE floats first_of(words pairs) { return (floats)(pairs << 16); }
INLINE floats second_of(words pairs) { return (floats)(pairs & 0xffff0000); }
#endif

INLINE float sum(floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#elif defined(__AVX2__)
    __m128 four = _mm_add_ps(_mm256_castps256_ps128((__m256)v), _mm256_extractf128_ps((__m256)v, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
    float total = 0;
    for (int lane = 0; lane < LANES; lane++) total += v[lane];
    return total;
#endif
}

INLINE floats larger(floats a, floats b) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
    return (floats)_mm256_max_ps((__m256)a, (__m256)b);
#else
    integers is_larger = a > b;
    return (floats)(((integers)a & is_larger) | ((integers)b & ~is_larger));
#endif
}

INLINE float largest(floats v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float found = v[0];
    for (int lane = 1; lane < LANES; lane++) found = v[lane] > found ? v[lane] : found;
    return found;
#endif
}

/* e^x with a relative error of about 2e-7; 0 for x < -87, e^88 for x > 88, NaN for NaN. */
#if defined(__AVX512F__)
INLINE floats exponential(floats x) {
    __m512 clamped = _mm512_min_ps(_mm512_set1_ps(88.0f), (__m512)x);        /* for NaN it returns the second operand */
    __mmask16 is_not_tiny = _mm512_cmp_ps_mask(clamped, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ);
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(1.44269504088896f)), 8);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), clamped);
    r = _mm512_fmadd_ps(n, _mm512_set1_ps(2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_add_ps(_mm512_fmadd_ps(p, _mm512_mul_ps(r, r), r), _mm512_set1_ps(1.0f));
    return (floats)_mm512_maskz_scalef_ps(is_not_tiny, p, n);
}
#else
INLINE floats exponential(floats x) {
    floats clamped = -larger(-larger(x, all(-87.5f)), all(-88.0f));
    floats scaled = clamped * 1.44269504088896f;
    integers half_of_its_sign = ((integers)scaled & (int32_t)0x80000000) | 0x3f000000;
    integers whole = __builtin_convertvector(scaled + (floats)half_of_its_sign, integers);
    floats n = __builtin_convertvector(whole, floats);
    floats r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    floats p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    floats result = (floats)((integers)p + (whole << 23));
    integers is_tiny = x < -87.0f, is_nan = x != x;
    return (floats)(((integers)result & ~is_tiny & ~is_nan) | ((integers)x & is_nan));
}
#endif

INLINE floats hyperbolic_tangent(floats x) {
    floats clamped = larger(-larger(-x, all(-15.0f)), all(-15.0f));
    floats e = exponential(clamped * 2.0f);
    return (e - 1.0f) / (e + 1.0f) + (x - x);    /* NaN stays NaN */
}
