/* Low-rank adapters: y += B (A x) for tiles of rows. A page has one rank of every projection: a row of A and a column
   of B, each contiguous. Sums are in float32. */
#pragma once
#include "vectors.h"

/* Rows with one adapter. */
typedef struct {
    int32_t first_row, end_row;
    const int32_t *pages;             /* the page of each rank */
    const int32_t *ranks;             /* the rank in each projection; 0: the adapter does not change it */
} AdapterTile;

typedef struct {
    const char *pages;
    int64_t page_entries;
    const AdapterTile *tiles;
    int64_t num_tiles;
    float *shrunk;                    /* [rows][projections of a layer][most_ranks]: A x of the current operation */
    int64_t most_ranks;               /* of an adapter of the step */
} Adapters;

#define PROJECTIONS_AT_ONCE 3
#define RANKS_PER_PIECE 16
#define ADDED_PER_PIECE 512           /* outputs */
#define AHEAD_OF_B 256                /* bytes */
#define ROWS_AT_ONCE 4
#define RANKS_AT_ONCE 4

/* The entry `first` of the page with a rank. */
INLINE const char *rank_at(const Adapters *a, const AdapterTile *t, int64_t rank, int64_t first, int type) {
    return a->pages + (t->pages[rank] * a->page_entries + first) * bytes_of(type);
}

/* to[r * stride + j] = the sum of sums[r][j]. */
INLINE void add_up(floats sums[ROWS_AT_ONCE][RANKS_AT_ONCE], int rows, float *to, int64_t stride) {
#if defined(__AVX512F__)
    for (int r = 0; r < rows; r++) {                       /* four vectors at once take half the instructions */
        __m512 a = (__m512)sums[r][0], b = (__m512)sums[r][1], c = (__m512)sums[r][2], d = (__m512)sums[r][3];
        __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        __m512 four = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))),
                                    _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd))));
        __m256 half = _mm256_add_ps(_mm512_castps512_ps256(four),
                                    _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(four), 1)));
        _mm_storeu_ps(to + r * stride, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
    }
#else
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < RANKS_AT_ONCE; j++) to[r * stride + j] = sum(sums[r][j]);
#endif
}

/* Sums of products of `rows` rows of x with RANKS_AT_ONCE rows of A. `inputs` is a multiple of 32. `next` are the rows
   of A that are read next, which are prefetched. */
INLINE void shrink_some(const char *x, int64_t stride, const char *const rank[RANKS_AT_ONCE],
                        const char *const next[RANKS_AT_ONCE], int64_t inputs, int rows, float *to, int64_t to_stride,
                        int type) {
    floats sums[ROWS_AT_ONCE][RANKS_AT_ONCE];
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < RANKS_AT_ONCE; j++) sums[r][j] = all(0);
#if defined(__AVX512BF16__)
    if (type == BFLOAT16)
        for (int64_t k = 0; k < inputs; k += 2 * LANES) {
            __m512bh a[RANKS_AT_ONCE];
            for (int j = 0; j < RANKS_AT_ONCE; j++) {
                prefetch(next[j] + 2 * k);
                a[j] = (__m512bh)_mm512_loadu_si512((const uint16_t *)rank[j] + k);
            }
            for (int r = 0; r < rows; r++) {
                __m512bh own = (__m512bh)_mm512_loadu_si512((const uint16_t *)x + r * stride + k);
                for (int j = 0; j < RANKS_AT_ONCE; j++)
                    sums[r][j] = (floats)_mm512_dpbf16_ps((__m512)sums[r][j], own, a[j]);
            }
        }
    else
#endif
        for (int64_t k = 0; k < inputs; k += LANES) {
            floats a[RANKS_AT_ONCE];
            for (int j = 0; j < RANKS_AT_ONCE; j++) a[j] = load(rank[j], k, type);
            for (int r = 0; r < rows; r++) {
                floats own = load(x, r * stride + k, type);
                for (int j = 0; j < RANKS_AT_ONCE; j++) sums[r][j] += own * a[j];
            }
        }
    add_up(sums, rows, to, to_stride);
}

/* to[row][rank] = A x for the ranks first .. end - 1 of the rows of a tile. x is row 0 of the step. `to` has room for
   whole groups of RANKS_AT_ONCE ranks. at_b: the entry of B, which is read next, and whose beginning is prefetched. */
INLINE void shrink(const Adapters *a, const AdapterTile *t, const char *x, int64_t stride, int64_t at, int64_t inputs,
                   int64_t first, int64_t end, float *to, int64_t to_stride, int64_t at_b, int type) {
    for (int64_t j = first; j < end; j++)
        for (int line = 0; line < AHEAD_OF_B; line += LINE_BYTES) prefetch_soon(rank_at(a, t, j, at_b, type) + line);
    for (int64_t j = first; j < end; j += RANKS_AT_ONCE) {
        const char *rank[RANKS_AT_ONCE], *next[RANKS_AT_ONCE];
        for (int i = 0; i < RANKS_AT_ONCE; i++) {
            int64_t later = j + i + RANKS_AT_ONCE;
            rank[i] = rank_at(a, t, j + i < end ? j + i : end - 1, at, type);
            next[i] = rank_at(a, t, later < end ? later : end - 1, at, type);
        }
        for (int64_t row = t->first_row; row < t->end_row; row += ROWS_AT_ONCE) {
            int64_t left = t->end_row - row;
            const char *own = x + row * stride * bytes_of(type);
            float *result = to + row * to_stride + j;
            if (left >= 4) shrink_some(own, stride, rank, next, inputs, 4, result, to_stride, type);
            else if (left == 3) shrink_some(own, stride, rank, next, inputs, 3, result, to_stride, type);
            else if (left == 2) shrink_some(own, stride, rank, next, inputs, 2, result, to_stride, type);
            else shrink_some(own, stride, rank, next, inputs, 1, result, to_stride, type);
        }
    }
}

/* y += sums of shrunk * B for `rows` rows and `count` outputs from `first` on. */
INLINE void expand_some(const Adapters *a, const AdapterTile *t, const float *shrunk, int64_t shrunk_stride,
                        int64_t ranks, int64_t at, char *y, int64_t stride, int64_t first, int64_t count, int rows, int type) {
    int64_t o = first, end = first + count;
    for (; o + 2 * LANES <= end; o += 2 * LANES) {
        floats sums[ROWS_AT_ONCE][2];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) sums[r][v] = load(y, r * stride + o + v * LANES, type);
        for (int64_t j = 0; j < ranks; j++) {
            const char *b = rank_at(a, t, j, at, type);
            floats low = load(b, o, type), high = load(b, o + LANES, type);
            prefetch(b + o * bytes_of(type) + AHEAD_OF_B);
            for (int r = 0; r < rows; r++) {
                float factor = shrunk[r * shrunk_stride + j];
                sums[r][0] += factor * low;
                sums[r][1] += factor * high;
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < 2; v++) store(y, r * stride + o + v * LANES, sums[r][v], type);
    }
    for (; o < end; o++)
        for (int r = 0; r < rows; r++) {
            float total = load_one(y, r * stride + o, type);
            for (int64_t j = 0; j < ranks; j++)
                total += shrunk[r * shrunk_stride + j] * load_one(rank_at(a, t, j, at, type), o, type);
            store_one(y, r * stride + o, total, type);
        }
}

/* The same for all rows of a tile. y and shrunk are row 0 of the step. */
INLINE void expand_add(const Adapters *a, const AdapterTile *t, const float *shrunk, int64_t shrunk_stride,
                       int64_t ranks, int64_t at, char *y, int64_t stride, int64_t first, int64_t count, int type) {
    for (int64_t row = t->first_row; row < t->end_row; row += ROWS_AT_ONCE) {
        int64_t left = t->end_row - row;
        char *own = y + row * stride * bytes_of(type);
        const float *from = shrunk + row * shrunk_stride;
        if (left >= 4) expand_some(a, t, from, shrunk_stride, ranks, at, own, stride, first, count, 4, type);
        else if (left == 3) expand_some(a, t, from, shrunk_stride, ranks, at, own, stride, first, count, 3, type);
        else if (left == 2) expand_some(a, t, from, shrunk_stride, ranks, at, own, stride, first, count, 2, type);
        else expand_some(a, t, from, shrunk_stride, ranks, at, own, stride, first, count, 1, type);
    }
}
