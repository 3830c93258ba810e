/* Attention in bfloat16 by tiles: the same sums as `attend`, for many query rows at once. Uses AMX tiles or, without
   AMX, blocks of AVX-512 vectors.

   The products of keys and queries are stored as [token][query], so that the softmax handles sixteen queries at a time.
   Weights are rounded to bfloat16, the input type of the tiles. Queries and weights are transposed in pairs of bfloat16
   numbers, the layout of a tile's second operand. */
#pragma once
#include "tiles.h"

#if defined(HAS_TILES) || (defined(__AVX512BF16__) && defined(__AVX512BW__))
#define HAS_ATTENTION_TILES 1
#define MIN_ROWS_FOR_ATTENTION_TILES 5
#define MIN_ROWS_FOR_ATTENTION_VECTORS 8                 /* `attend` is faster for fewer than 7 */
#define QUERY_GROUPS (MAX_QUERY_ROWS / TILE_ROWS)

/* to[i][j] = from[j][i] */
static void transpose(const words from[16], uint32_t *to) {
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
        _mm512_storeu_si512(to + 16 * c, _mm512_shuffle_i32x4(low, high, 0x88));
        _mm512_storeu_si512(to + 16 * (8 + c), _mm512_shuffle_i32x4(low, high, 0xdd));
        _mm512_storeu_si512(to + 16 * (4 + c), _mm512_shuffle_i32x4(odd, odd_high, 0x88));
        _mm512_storeu_si512(to + 16 * (12 + c), _mm512_shuffle_i32x4(odd, odd_high, 0xdd));
    }
}

typedef struct {
    uint32_t queries[QUERY_GROUPS][MAX_HEAD_SIZE / 32][16][16];     /* [32 entries of a head][pair][query] */
    uint32_t weights[QUERY_GROUPS][MAX_BLOCK_TOKENS / 32][16][16];  /* [32 tokens][query][pair of tokens] */
    uint32_t values[MAX_BLOCK_TOKENS / 32][MAX_HEAD_SIZE / 16][16][16];    /* [32 tokens][16 entries][pair][entry] */
    float scores[MAX_BLOCK_TOKENS][MAX_QUERY_ROWS];
    float sums[MAX_QUERY_ROWS][MAX_HEAD_SIZE];           /* entries in the order of `pair_values` */
} __attribute__((aligned(64))) AttentionTiles;

static __thread AttentionTiles attention_tiles;          /* not on the stack, whose size the host controls */

/* Interleave the values of pairs of tokens. Of 32 entries, the first tile gets 0-3, 8-11, 16-19 and 24-27, and the
   second tile gets the others. Tokens after the last, up to a multiple of 32, become zeros: unwritten memory may hold
   NaN, and 0 * NaN is NaN. */
static void pair_values(AttentionTiles *a, const char *values, int64_t size, int64_t tokens, const char *soon) {
    for (int64_t t = 0; t < (tokens + 31) / 32 * 32; t += 2)
        for (int64_t i = 0; i < size; i += 32) {
            const char *first = values + (t * size + i) * 2, *second = first + size * 2;
            __m512i x = t < tokens ? _mm512_loadu_si512(first) : _mm512_setzero_si512();
            __m512i y = t + 1 < tokens ? _mm512_loadu_si512(second) : _mm512_setzero_si512();
            uint32_t *to = a->values[t / 32][i / 16][t % 32 / 2];
            _mm512_store_si512(to, _mm512_unpacklo_epi16(x, y));
            _mm512_store_si512(to + 256, _mm512_unpackhi_epi16(x, y));
            prefetch_soon(soon + (t * size + i) * 2);
            prefetch_soon(soon + ((t + 1) * size + i) * 2);
        }
}

#if defined(HAS_TILES)
static void score_page_by_amx(AttentionTiles *a, const char *keys, int groups, int64_t size, int64_t tokens,
                              const char *soon) {
    for (int64_t t = 0; t < tokens; t += TILE_ROWS) {
        for (int64_t at = 0; at < TILE_ROWS * size * 2; at += LINE_BYTES) prefetch_soon(soon + t * size * 2 + at);
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
        _tile_stored(0, a->scores[t], sizeof a->scores[0]);
        if (groups > 1) _tile_stored(1, a->scores[t] + TILE_ROWS, sizeof a->scores[0]);
    }
}

static void add_page_by_amx(AttentionTiles *a, int groups, int64_t size, int64_t tokens) {
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
INLINE void score_eight(AttentionTiles *a, const char *keys, int groups, int64_t size, int64_t t) {
    floats sums[8][QUERY_GROUPS];
    for (int j = 0; j < 8; j++)
        for (int group = 0; group < groups; group++) sums[j][group] = all(0);
    for (int64_t i = 0; i < size / 2; i++) {
        words queries[QUERY_GROUPS];
        for (int group = 0; group < groups; group++) queries[group] = *(const words *)a->queries[group][i / 16][i % 16];
        for (int j = 0; j < 8; j++) {
            uint32_t two;
            memcpy(&two, keys + ((t + j) * size + 2 * i) * 2, 4);
            for (int group = 0; group < groups; group++)
                sums[j][group] = add_pairs(sums[j][group], two, queries[group]);
        }
    }
    for (int j = 0; j < 8; j++)
        for (int group = 0; group < groups; group++) *(floats *)(a->scores[t + j] + group * TILE_ROWS) = sums[j][group];
}

static void score_page_by_vectors(AttentionTiles *a, const char *keys, int groups, int64_t size, int64_t tokens,
                                  const char *soon) {
    for (int64_t t = 0; t < tokens; t += 8) {
        for (int64_t at = 0; at < 8 * size * 2; at += LINE_BYTES) prefetch_soon(soon + t * size * 2 + at);
        if (groups > 1) score_eight(a, keys, 2, size, t);
        else score_eight(a, keys, 1, size, t);
    }
}

/* Add the weighted values of a page in the layout of `pair_values`, four rows and 32 entries of a head at a time. */
static void add_page_by_vectors(AttentionTiles *a, int rows, int64_t size, int64_t tokens) {
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

/* Turn the scores of sixteen queries for one page into weights. Updates maximum and total, and rescales `sums`. */
static void weigh_page(AttentionTiles *a, const Scores *how, int group, integers position, floats slope, int64_t start,
                       int64_t tokens, int is_whole, int64_t size, floats *maximum, floats *total) {
    floats most = *maximum;
    for (int64_t t = 0; t < tokens; t++) {
        floats *at = (floats *)(a->scores[t] + group * TILE_ROWS), s = *at * how->scale;
        if (how->softcap != 0) s = hyperbolic_tangent(s / how->softcap) * how->softcap;
        int32_t key = (int32_t)(start + t);
        if (how->slopes) s += alibi(how, all_integers(key), position, slope);
        if (!is_whole) {
            integers sees = all_integers(key) <= position;
            if (how->window && key >= how->sinks) sees &= all_integers(key) > position - (int32_t)how->window;
            s = (floats)(((integers)s & sees) | ((integers)all(-INFINITY) & ~sees));
        }
        *at = s;
        most = larger(s, most);
    }
    if (_mm512_cmp_ps_mask((__m512)most, (__m512)*maximum, _CMP_GT_OQ)) {
        floats shrink = exponential(*maximum - most);
        *maximum = most;
        *total *= shrink;
        for (int row = 0; row < TILE_ROWS; row++) {
            float *sums = a->sums[group * TILE_ROWS + row];
            if (shrink[row] != 1.0f)
                for (int64_t i = 0; i < size; i += LANES) *(floats *)(sums + i) *= shrink[row];
        }
    }
    floats sum = all(0);
    for (int64_t t = 0; t < tokens; t += 32) {
        words pairs[16];
        for (int j = 0; j < 16; j++) {
            floats first = exponential(*(floats *)(a->scores[t + 2 * j] + group * TILE_ROWS) - most);
            floats second = exponential(*(floats *)(a->scores[t + 2 * j + 1] + group * TILE_ROWS) - most);
            sum += first + second;
            pairs[j] = (((words)first + 0x8000) >> 16) | (((words)second + 0x8000) & 0xffff0000);
        }
        transpose(pairs, a->weights[group][t / 32][0]);
    }
    *total += sum;
}

static int fits_tiles(const Cache *c, int rows) {
    int fewest = may_use_tiles() ? MIN_ROWS_FOR_ATTENTION_TILES : MIN_ROWS_FOR_ATTENTION_VECTORS;
    return c->type == BFLOAT16 && rows >= fewest && c->head_size % 32 == 0 && c->block_tokens % 32 == 0;
}

/* Like `attend`. Requires `fits_tiles`. */
static void attend_in_tiles(const Cache *c, const Scores *how, const Task *task, Partial *partial) {
    AttentionTiles *a = &attention_tiles;
    /* In a shared library, taking the address of a thread-local variable is a function call, which GCC would repeat in
       the inner loops. This hides the origin of the address, so that GCC keeps it in a register. */
    __asm__("" : "+r"(a));
    const int64_t *position = task->position;
    int rows = task->rows, groups = (rows + TILE_ROWS - 1) / TILE_ROWS;
    int64_t size = c->head_size, width = size * 2, first = position[0], last = position[0];
    integers positions[QUERY_GROUPS];
    floats maximum[QUERY_GROUPS], total[QUERY_GROUPS], slopes[QUERY_GROUPS];
    for (int row = 0; row < groups * TILE_ROWS; row++) {
        int64_t at = position[row < rows ? row : 0];
        positions[row / TILE_ROWS][row % TILE_ROWS] = (int32_t)at;
        slopes[row / TILE_ROWS][row % TILE_ROWS] = how->slopes ? task->slopes[row < rows ? row : 0] : 0;
        first = at < first ? at : first;
        last = at > last ? at : last;
        memset(a->sums[row], 0, sizeof(float) * (size_t)size);
    }
    for (int group = 0; group < groups; group++) {
        maximum[group] = all(-1e30f);
        total[group] = all(0);
        for (int64_t i = 0; i < size; i += 32) {
            words pairs[16];
            for (int row = 0; row < TILE_ROWS; row++) {
                int query = group * TILE_ROWS + row;
                pairs[row] = *(const words *)(task->queries + (query < rows ? query : 0) * width + i * 2);
            }
            transpose(pairs, a->queries[group][i / 32][0]);
        }
    }
#if defined(HAS_TILES)
    int by_amx = may_use_tiles();
    if (by_amx) shape_tiles((const uint8_t[8]){16, 16, 16, 16, 16, 16, 16, 16});
#endif
    int64_t end = end_of(task, last);
    Page page;
    for (int64_t start = task->first_key; start < end; start += c->block_tokens) {
        if (!find_page(c, how, task, first, last, start, &page)) continue;
        int64_t tokens = (page.tokens + 31) / 32 * 32;
#if defined(HAS_TILES)
        if (by_amx) score_page_by_amx(a, page.keys, groups, size, tokens, page.values);
        else
#endif
        score_page_by_vectors(a, page.keys, groups, size, tokens, page.values);
        for (int group = 0; group < groups; group++)
            weigh_page(a, how, group, positions[group], slopes[group], start, tokens, page.is_whole, size,
                       maximum + group, total + group);
        pair_values(a, page.values, size, page.tokens, page.soon);
#if defined(HAS_TILES)
        if (by_amx) add_page_by_amx(a, groups, size, tokens);
        else
#endif
        add_page_by_vectors(a, rows, size, tokens);
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
