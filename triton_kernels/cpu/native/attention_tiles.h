/* Attention in bfloat16 by tiles: the same sums as `attend`, with weights rounded to bfloat16, the input type of the
   tiles. Uses AMX tiles or blocks of AVX-512 vectors.

   Vectors have two ways. For many rows, the products of keys and queries are stored as [token][query], so that the
   softmax handles sixteen queries at a time. For few rows, keys are transposed, and a vector has sixteen keys of one
   query. Both add the same numbers in the same order: the result has the same bits. AMX tiles add in another order. They
   are used for many rows; for all rows if the cache is_uniform.

   Queries, keys and weights are transposed in pairs of bfloat16 numbers, the layout of a tile's second operand. */
#pragma once
#include "tiles.h"

#if defined(HAS_TILES) || (defined(__AVX512BF16__) && defined(__AVX512BW__))
#define HAS_ATTENTION_TILES 1
#define MIN_ROWS_FOR_ATTENTION_TILES 5
#define MAX_FEW_ROWS 8
#define QUERY_GROUPS (MAX_QUERY_ROWS / TILE_ROWS)

/* to[i][j] = from[j][i] */
INLINE void transpose(const words from[16], words to[16]) {
    __m512i a[16], b[16];
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_epi32((__m512i)from[2 * i], (__m512i)from[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32((__m512i)from[2 * i], (__m512i)from[2 * i + 1]);
    }
    for (int i = 0; i < 4; i++) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
    /* 128-bit lane l of b[4 i + c] is column 4 l + c of the rows 4 i .. 4 i + 3. */
    for (int c = 0; c < 4; c++) {
        __m512i low = _mm512_shuffle_i32x4(b[c], b[4 + c], 0x88), odd = _mm512_shuffle_i32x4(b[c], b[4 + c], 0xdd);
        __m512i high = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0x88);
        __m512i odd_high = _mm512_shuffle_i32x4(b[8 + c], b[12 + c], 0xdd);
        to[c] = (words)_mm512_shuffle_i32x4(low, high, 0x88);
        to[8 + c] = (words)_mm512_shuffle_i32x4(low, high, 0xdd);
        to[4 + c] = (words)_mm512_shuffle_i32x4(odd, odd_high, 0x88);
        to[12 + c] = (words)_mm512_shuffle_i32x4(odd, odd_high, 0xdd);
    }
}

typedef struct {
    uint32_t queries[QUERY_GROUPS][MAX_HEAD_SIZE / 32][16][16];     /* [32 entries of a head][pair][query] */
    uint32_t weights[QUERY_GROUPS][KEYS_AT_ONCE / 32][16][16];      /* [32 tokens][query][pair of tokens] */
    uint32_t values[KEYS_AT_ONCE / 32][MAX_HEAD_SIZE / 16][16][16]; /* [32 tokens][16 entries][pair][entry] */
    float scores[KEYS_AT_ONCE][MAX_QUERY_ROWS];
    float scores_of_few[MAX_FEW_ROWS][KEYS_AT_ONCE];
    float sums[MAX_QUERY_ROWS][MAX_HEAD_SIZE];           /* entries in the order of `pair_values` */
} __attribute__((aligned(64))) AttentionTiles;

static __thread AttentionTiles attention_tiles;          /* not on the stack, whose size the host controls */

/* Interleave the values of pairs of tokens. Of 32 entries, the first tile gets 0-3, 8-11, 16-19 and 24-27, and the
   second tile gets the others. Tokens that no row sees, up to a multiple of 32, become zeros: their memory may hold NaN,
   and 0 * NaN is NaN. */
static void pair_values(AttentionTiles *a, const Keys *found, int64_t size) {
    int64_t t = 0, end = (found->tokens + 31) / 32 * 32;
    for (int number = 0; number <= found->num_pieces; number++) {
        const Piece *piece = found->pieces + number;
        int64_t first = number < found->num_pieces ? piece->first : end;
        for (; t < first; t += 2)
            for (int64_t i = 0; i < size / 16; i++) memset(a->values[t / 32][i][t % 32 / 2], 0, LINE_BYTES);
        for (; t < end && number < found->num_pieces && t < first + piece->tokens; t += 2)
            for (int64_t i = 0; i < size; i += 32) {
                int64_t at = ((t - first) * size + i) * 2;
                __m512i x = _mm512_loadu_si512(piece->values + at), y = _mm512_setzero_si512();
                if (t + 1 < first + piece->tokens) y = _mm512_loadu_si512(piece->values + at + size * 2);
                uint32_t *to = a->values[t / 32][i / 16][t % 32 / 2];
                _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
                _mm512_store_si512(to + 256, _mm512_unpackhi_epi16(x, y));
                prefetch_soon(piece->soon + at);
                prefetch_soon(piece->soon + at + size * 2);
            }
    }
}

#if defined(HAS_TILES)
static void score_by_amx(AttentionTiles *a, const Piece *piece, int groups, int64_t size) {
    const char *keys = piece->keys;
    finish_stores(a);
    for (int64_t t = 0; t < piece->tokens; t += TILE_ROWS) {
        for (int64_t at = 0; at < TILE_ROWS * size * 2; at += LINE_BYTES)
            prefetch_soon(piece->values + t * size * 2 + at);
        _tile_zero(0); _tile_zero(1);
        for (int64_t i = 0; i < size; i += 32) {
            _tile_loadd(2, keys + (t * size + i) * 2, size * 2);
            _tile_loadd(3, a->queries[0][i / 32], 64);
            _tile_dpbf16ps(0, 2, 3);
            if (groups > 1) {
                _tile_loadd(4, a->queries[1][i / 32], 64);
                _tile_dpbf16ps(1, 2, 4);
            }
        }
        float *to = a->scores[piece->first + t];
        _tile_stored(0, to, sizeof a->scores[0]);
        if (groups > 1) _tile_stored(1, to + TILE_ROWS, sizeof a->scores[0]);
    }
}

static void add_by_amx(AttentionTiles *a, int groups, int64_t size, int64_t tokens) {
    finish_stores(a);
    for (int64_t i = 0; i < size / 16; i++) {
        _tile_loadd(0, a->sums[0] + i * 16, sizeof a->sums[0]);
        if (groups > 1) _tile_loadd(1, a->sums[TILE_ROWS] + i * 16, sizeof a->sums[0]);
        for (int64_t k = 0; k < tokens / 32; k++) {
            _tile_loadd(2, a->values[k][i], 64);
            _tile_loadd(3, a->weights[0][k], 64);
            _tile_dpbf16ps(0, 3, 2);
            if (groups > 1) {
                _tile_loadd(4, a->weights[1][k], 64);
                _tile_dpbf16ps(1, 4, 2);
            }
        }
        _tile_stored(0, a->sums[0] + i * 16, sizeof a->sums[0]);
        if (groups > 1) _tile_stored(1, a->sums[TILE_ROWS] + i * 16, sizeof a->sums[0]);
    }
}
#endif

/* Score eight tokens with one or two groups of queries; the sums stay in registers. */
INLINE void score_eight(AttentionTiles *a, const char *keys, int groups, int64_t size, float *to) {
    floats sums[8][QUERY_GROUPS];
    for (int j = 0; j < 8; j++)
        for (int group = 0; group < groups; group++) sums[j][group] = all(0);
    for (int64_t i = 0; i < size / 2; i++) {
        words queries[QUERY_GROUPS];
        for (int group = 0; group < groups; group++) queries[group] = *(const words *)a->queries[group][i / 16][i % 16];
        for (int j = 0; j < 8; j++) {
            uint32_t two;
            memcpy(&two, keys + (j * size + 2 * i) * 2, 4);
            for (int group = 0; group < groups; group++)
                sums[j][group] = add_pairs(sums[j][group], two, queries[group]);
        }
    }
    for (int j = 0; j < 8; j++)
        for (int group = 0; group < groups; group++)
            *(floats *)(to + j * MAX_QUERY_ROWS + group * TILE_ROWS) = sums[j][group];
}

static void score_by_vectors(AttentionTiles *a, const Piece *piece, int groups, int64_t size) {
    for (int64_t t = 0; t < piece->tokens; t += 8) {
        const char *keys = piece->keys + t * size * 2;
        for (int64_t at = 0; at < 8 * size * 2; at += LINE_BYTES) prefetch_soon(piece->values + t * size * 2 + at);
        if (groups > 1) score_eight(a, keys, 2, size, a->scores[piece->first + t]);
        else score_eight(a, keys, 1, size, a->scores[piece->first + t]);
    }
}

/* Score sixteen tokens with R rows. */
INLINE void score_sixteen(AttentionTiles *a, const char *keys, const char *queries, const int R, int64_t size,
                          int64_t to) {
    floats sums[MAX_FEW_ROWS];
    for (int r = 0; r < R; r++) sums[r] = all(0);
    for (int64_t i = 0; i < size; i += 32) {
        words entries[16], pairs[16];
        for (int t = 0; t < 16; t++) entries[t] = *(const words *)(keys + (t * size + i) * 2);
        transpose(entries, pairs);
        for (int pair = 0; pair < 16; pair++)
            for (int r = 0; r < R; r++) {
                uint32_t two;
                memcpy(&two, queries + (r * size + i + 2 * pair) * 2, 4);
                sums[r] = add_pairs(sums[r], two, pairs[pair]);
            }
    }
    for (int r = 0; r < R; r++) *(floats *)(a->scores_of_few[r] + to) = sums[r];
}

INLINE void score_few_of(AttentionTiles *a, const Piece *piece, const char *queries, int rows, int64_t size) {
    for (int64_t t = 0; t < piece->tokens; t += 16) {
        const char *keys = piece->keys + t * size * 2;
        int64_t to = piece->first + t;
        for (int64_t at = 0; at < 16 * size * 2; at += LINE_BYTES) prefetch_soon(piece->values + t * size * 2 + at);
        switch (rows) {
        case 1: score_sixteen(a, keys, queries, 1, size, to); break;
        case 2: score_sixteen(a, keys, queries, 2, size, to); break;
        case 3: score_sixteen(a, keys, queries, 3, size, to); break;
        case 4: score_sixteen(a, keys, queries, 4, size, to); break;
        case 5: score_sixteen(a, keys, queries, 5, size, to); break;
        case 6: score_sixteen(a, keys, queries, 6, size, to); break;
        case 7: score_sixteen(a, keys, queries, 7, size, to); break;
        default: score_sixteen(a, keys, queries, 8, size, to);
        }
    }
}

static void score_few(AttentionTiles *a, const Piece *piece, const char *queries, int rows, int64_t size) {
    if (size == 64) score_few_of(a, piece, queries, rows, 64);     /* common sizes need no registers for addresses */
    else if (size == 128) score_few_of(a, piece, queries, rows, 128);
    else score_few_of(a, piece, queries, rows, size);
}

/* Add weighted values in the layout of `pair_values`, four rows and 32 entries of a head at a time. */
static void add_by_vectors(AttentionTiles *a, int rows, int64_t size, int64_t tokens) {
    for (int row = 0; row < rows; row += 4)
        for (int64_t i = 0; i < size / 16; i += 2) {
            floats sums[4][2];
            for (int r = 0; r < 4; r++)
                for (int v = 0; v < 2; v++) sums[r][v] = *(const floats *)(a->sums[row + r] + (i + v) * 16);
            for (int64_t k = 0; k < tokens / 32; k++)
                for (int pair = 0; pair < 16; pair++) {
                    words values[2];
                    for (int v = 0; v < 2; v++) values[v] = *(const words *)a->values[k][i + v][pair];
                    for (int r = 0; r < 4; r++)
                        for (int v = 0; v < 2; v++)
                            sums[r][v] = add_pairs(sums[r][v], a->weights[(row + r) / TILE_ROWS][k]
                                                                         [(row + r) % TILE_ROWS][pair], values[v]);
                }
            for (int r = 0; r < 4; r++)
                for (int v = 0; v < 2; v++) *(floats *)(a->sums[row + r] + (i + v) * 16) = sums[r][v];
        }
}

/* The same for R rows from `row` on, and B times 32 entries, without `pair_values`. */
INLINE void add_some(AttentionTiles *a, const Keys *found, int row, const int R, const int B, int64_t i, int64_t size) {
    floats sums[4][4];
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2 * B; v++) sums[r][v] = *(const floats *)(a->sums[row + r] + i + v * 16);
    for (const Piece *piece = found->pieces; piece < found->pieces + found->num_pieces; piece++)
        for (int64_t t = 0; t < piece->tokens; t += 2) {
            const char *first = piece->values + (t * size + i) * 2, *second = first + size * 2;
            int64_t pair = (piece->first + t) / 2;
            words values[4];
            for (int block = 0; block < B; block++) {
                __m512i x = _mm512_loadu_si512(first + block * LINE_BYTES), y = _mm512_setzero_si512();
                if (t + 1 < piece->tokens) y = _mm512_loadu_si512(second + block * LINE_BYTES);
                values[2 * block] = (words)_mm512_unpacklo_epi16(x, y);
                values[2 * block + 1] = (words)_mm512_unpackhi_epi16(x, y);
                prefetch_soon(piece->soon + (t * size + i) * 2 + block * LINE_BYTES);
                prefetch_soon(piece->soon + ((t + 1) * size + i) * 2 + block * LINE_BYTES);
            }
            for (int r = 0; r < R; r++)
                for (int v = 0; v < 2 * B; v++)
                    sums[r][v] = add_pairs(sums[r][v], a->weights[0][pair / 16][row + r][pair % 16], values[v]);
        }
    for (int r = 0; r < R; r++)
        for (int v = 0; v < 2 * B; v++) *(floats *)(a->sums[row + r] + i + v * 16) = sums[r][v];
}

static void add_few(AttentionTiles *a, const Keys *found, int rows, int64_t size) {
    for (int row = 0; row < rows; row += 4) {
        int64_t i = 0;
        for (; i + 64 <= size; i += 64)
            switch (rows - row) {
            case 1: add_some(a, found, row, 1, 2, i, size); break;
            case 2: add_some(a, found, row, 2, 2, i, size); break;
            case 3: add_some(a, found, row, 3, 2, i, size); break;
            default: add_some(a, found, row, 4, 2, i, size);
            }
        for (; i < size; i += 32)
            switch (rows - row) {
            case 1: add_some(a, found, row, 1, 1, i, size); break;
            case 2: add_some(a, found, row, 2, 1, i, size); break;
            case 3: add_some(a, found, row, 3, 1, i, size); break;
            default: add_some(a, found, row, 4, 1, i, size);
            }
    }
}

INLINE words to_weights(floats p) { return (words)p + 0x8000; }       /* the upper halves are weights */

/* The sum of sixteen vectors, in the order of `sum_of_lanes`. Overwrites v. */
INLINE floats sum_of_vectors(floats v[16]) {
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}

INLINE float sum_of_lanes(floats v) {
    __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v),
                                 _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd((__m512)v), 1)));
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* Multiply the sums of a row so far by `shrink`. */
INLINE void shrink_sums(AttentionTiles *a, int row, int64_t size, float shrink) {
    if (shrink != 1.0f)
        for (int64_t i = 0; i < size; i += LANES) *(floats *)(a->sums[row] + i) *= shrink;
}

/* Turn the scores of one of few rows into weights. Updates maximum and total, and rescales `sums`. */
static void weigh_few(AttentionTiles *a, const Scores *how, int row, int32_t position, float slope, int64_t start,
                      int64_t tokens, int is_whole, int64_t size, float *maximum, float *total) {
    floats most = all(*maximum), sums = all(0);
    for (int64_t t = 0; t < tokens; t += 16) {
        floats *at = (floats *)(a->scores_of_few[row] + t);
        *at = masked_scores(*at, how, FIRST_INTEGERS + (int32_t)(start + t), all_integers(position), all(slope),
                            is_whole);
        most = larger(*at, most);
    }
    float top = largest(most);
    if (top > *maximum) {
        float shrink = exponential(all(*maximum - top))[0];
        *maximum = top;
        *total *= shrink;
        shrink_sums(a, row, size, shrink);
    }
    for (int64_t t = 0; t < tokens; t += 16) {
        floats p = exponential(*(const floats *)(a->scores_of_few[row] + t) - *maximum);
        sums += p;
        *(halves *)((uint16_t *)a->weights[0][t / 32][row] + t % 32) =
            __builtin_convertvector(to_weights(p) >> 16, halves);
    }
    *total += sum_of_lanes(sums);
}

/* Turn the scores of sixteen queries into weights. Updates maximum and total, and rescales `sums`. */
static void weigh_group(AttentionTiles *a, const Scores *how, int group, integers position, floats slope, int64_t start,
                        int64_t tokens, int is_whole, int64_t size, floats *maximum, floats *total) {
    floats most = *maximum, sums[16] = {};
    for (int64_t t = 0; t < tokens; t++) {
        floats *at = (floats *)(a->scores[t] + group * TILE_ROWS);
        *at = masked_scores(*at, how, all_integers((int32_t)(start + t)), position, slope, is_whole);
        most = larger(*at, most);
    }
    if (_mm512_cmp_ps_mask((__m512)most, (__m512)*maximum, _CMP_GT_OQ)) {
        floats shrink = exponential(*maximum - most);
        *maximum = most;
        *total *= shrink;
        for (int row = 0; row < TILE_ROWS; row++) shrink_sums(a, group * TILE_ROWS + row, size, shrink[row]);
    }
    for (int64_t t = 0; t < tokens; t += 32) {
        words pairs[16];
        for (int j = 0; j < 16; j++) {
            floats first = exponential(*(const floats *)(a->scores[t + 2 * j] + group * TILE_ROWS) - most);
            floats second = exponential(*(const floats *)(a->scores[t + 2 * j + 1] + group * TILE_ROWS) - most);
            sums[2 * j % 16] += first;
            sums[2 * j % 16 + 1] += second;
            pairs[j] = to_weights(first) >> 16 | (to_weights(second) & 0xffff0000);
        }
        transpose(pairs, (words *)a->weights[group][t / 32]);
    }
    *total += sum_of_vectors(sums);
}

/* Whether `attend_in_tiles` computes all attention of rows of this type over a cache. */
INLINE int fits_tiles(const Cache *c, int type) { return type == BFLOAT16 && c->head_size % 32 == 0; }

/* Like `attend`. Requires `fits_tiles`. */
static void attend_in_tiles(const Cache *c, const Scores *how, const Task *task, Partial *partial) {
    AttentionTiles *a = &attention_tiles;
    /* In a shared library, taking the address of a thread-local variable is a function call, which GCC would repeat in
       the inner loops. This hides the origin of the address, so that GCC keeps it in a register. */
    __asm__("" : "+r"(a));
    const int64_t *position = task->position;
    int rows = task->rows, groups = (rows + TILE_ROWS - 1) / TILE_ROWS, is_few = rows <= MAX_FEW_ROWS;
    int64_t size = c->head_size, width = size * 2, first = position[0], last = position[0];
    integers positions[QUERY_GROUPS];
    floats maximum[QUERY_GROUPS], total[QUERY_GROUPS], slopes[QUERY_GROUPS];
#if defined(HAS_TILES)
    int by_amx = may_use_tiles() && (c->is_uniform || rows >= MIN_ROWS_FOR_ATTENTION_TILES);
    if (by_amx) is_few = 0, shape_tiles((const uint8_t[8]){16, 16, 16, 16, 16, 16, 16, 16});
#endif
    for (int row = 0; row < groups * TILE_ROWS; row++) {
        int64_t at = position[row < rows ? row : 0];
        positions[row / TILE_ROWS][row % TILE_ROWS] = (int32_t)at;
        slopes[row / TILE_ROWS][row % TILE_ROWS] = how->slopes ? task->slopes[row < rows ? row : 0] : 0;
        first = at < first ? at : first;
        last = at > last ? at : last;
        if (row < rows || !is_few) memset(a->sums[row], 0, sizeof(float) * (size_t)size);
    }
    for (int group = 0; group < groups; group++) {
        maximum[group] = all(-1e30f);
        total[group] = all(0);
        for (int64_t i = 0; i < size && !is_few; i += 32) {
            words pairs[16];
            for (int row = 0; row < TILE_ROWS; row++) {
                int query = group * TILE_ROWS + row;
                pairs[row] = *(const words *)(task->queries + (query < rows ? query : 0) * width + i * 2);
            }
            transpose(pairs, (words *)a->queries[group][i / 32]);
        }
    }
    int64_t end = end_of(task, last);
    Keys found;
    for (int64_t start = task->first_key; start < end; start += KEYS_AT_ONCE) {
        if (!find_keys(c, how, task, first, last, start, &found)) continue;
        if (c->type == FP8) widen_keys(c, &found, BFLOAT16);
        int64_t tokens = (found.tokens + 31) / 32 * 32;
        for (const Piece *piece = found.pieces; piece < found.pieces + found.num_pieces; piece++)
            if (is_few) score_few(a, piece, task->queries, rows, size);
#if defined(HAS_TILES)
            else if (by_amx) score_by_amx(a, piece, groups, size);
#endif
            else score_by_vectors(a, piece, groups, size);
        if (is_few)
            for (int row = 0; row < rows; row++) {
                float most = maximum[0][row], sum = total[0][row];
                weigh_few(a, how, row, (int32_t)position[row], slopes[0][row], start, tokens, found.is_whole, size,
                          &most, &sum);
                maximum[0][row] = most;
                total[0][row] = sum;
            }
        else
            for (int group = 0; group < groups; group++)
                weigh_group(a, how, group, positions[group], slopes[group], start, tokens, found.is_whole, size,
                            maximum + group, total + group);
        if (is_few) {
            add_few(a, &found, rows, size);
            continue;
        }
        pair_values(a, &found, size);
#if defined(HAS_TILES)
        if (by_amx) add_by_amx(a, groups, size, tokens);
        else
#endif
        add_by_vectors(a, rows, size, tokens);
    }
#if defined(HAS_TILES)
    if (by_amx) _tile_release();
#endif
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    for (int row = 0; row < rows; row++) {
        partial->maximum[row] = maximum[row / TILE_ROWS][row % TILE_ROWS];
        partial->total[row] = total[row / TILE_ROWS][row % TILE_ROWS];
        for (int64_t i = 0; i < size; i += 32) {
            __m512 x = _mm512_load_ps(a->sums[row] + i), y = _mm512_load_ps(a->sums[row] + i + 16);
            _mm512_store_ps(partial->sums[row] + i, _mm512_permutex2var_ps(x, low, y));
            _mm512_store_ps(partial->sums[row] + i + 16, _mm512_permutex2var_ps(x, high, y));
        }
    }
}
#endif
