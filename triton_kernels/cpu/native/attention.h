/* Attention of a few query rows over the pages of one sequence and one kv head.

   A page is [tokens_per_block][head_size], contiguous. The rows are the query heads that share the kv head, for one
   token or several consecutive tokens. The softmax runs over KEYS_AT_ONCE keys at a time with a running maximum
   ("Online normalizer calculation for softmax", arXiv 1805.02867), in float32.

   The bits of a row do not depend on the other rows or on the size of pages. Keys are counted from the start of the
   sequence: those that are weighed together, and the parts whose results are merged, begin at multiples of their
   number. Keys that a row does not see add zeros to its sums. Where the compiler could choose the order of rounding,
   `fused` fixes it. */
#pragma once
#include "fp8.h"

#define MAX_QUERY_ROWS 32
#define MAX_HEAD_SIZE 256
#define KEYS_AT_ONCE 64
#define KEYS_PER_PART 512
#define MIN_BLOCK_TOKENS 16

/* block_tokens   a multiple of MIN_BLOCK_TOKENS that divides or is divided by KEYS_AT_ONCE
   type           of the keys and values in the pool: that of the rows of a step, or FP8
   is_uniform     see Matrix */
typedef struct {
    const char *pool;                 /* [blocks, layers, 2, kv_heads, tokens_per_block, head_size] */
    int64_t num_layers, kv_heads, block_tokens, head_size, query_heads;
    int type, is_uniform;
} Cache;

/* slopes         [query_heads] or NULL: add the ALiBi bias slope * (key position - query position) to scores
   factor         not 0: the bias is factor * (f(key position) - f(query position)) with f(p) = bfloat16(slope *
                  bfloat16(p))
   sink_logits    [query_heads] or NULL: the score of an extra key whose value is zero */
typedef struct {
    float scale, softcap;             /* softcap 0: none */
    int64_t window, sinks;            /* window 0: none */
    const float *slopes;
    float factor;
    const float *sink_logits;
} Scores;

INLINE floats to_bfloat16(floats x) {
    words bits = (words)x;
    return (floats)((bits + 0x7fff + ((bits >> 16) & 1)) & 0xffff0000);
}

/* Scores plus the ALiBi bias for keys and queries at these positions. */
INLINE floats add_alibi(floats scores, const Scores *how, integers key, integers query, floats slope) {
    if (how->factor == 0) return fused(slope, __builtin_convertvector(key - query, floats), scores);
    floats of_key = to_bfloat16(slope * to_bfloat16(__builtin_convertvector(key, floats)));
    floats of_query = to_bfloat16(slope * to_bfloat16(__builtin_convertvector(query, floats)));
    return fused(of_key - of_query, all(how->factor), scores);
}

/* Scores from dot products, with -infinity for keys that a query does not see. is_whole: it sees all. */
INLINE floats masked_scores(floats products, const Scores *how, integers key, integers query, floats slope,
                            int is_whole) {
    floats s = products * how->scale;
    if (how->softcap != 0) s = hyperbolic_tangent(s / how->softcap) * how->softcap;
    if (how->slopes) s = add_alibi(s, how, key, query, slope);
    if (is_whole) return s;
    integers sees = key <= query;
    if (how->window) sees &= (key > query - (int32_t)how->window) | (key < (int32_t)how->sinks);
    return (floats)(((integers)s & sees) | ((integers)all(-INFINITY) & ~sees));
}

INLINE int64_t page_bytes(const Cache *c) { return c->block_tokens * c->head_size * bytes_of(c->type); }

INLINE const char *page_of(const Cache *c, int64_t block, int64_t layer, int is_value, int64_t head) {
    return c->pool + (((block * c->num_layers + layer) * 2 + is_value) * c->kv_heads + head) * page_bytes(c);
}

#if defined(__AVX512F__)
/* Return the sum of each of LANES vectors. */
INLINE floats sums_of(const floats v[LANES]) {
    __m512 four[4];
    for (int i = 0; i < 4; i++) {
        __m512 a = (__m512)v[4 * i], b = (__m512)v[4 * i + 1], c = (__m512)v[4 * i + 2], d = (__m512)v[4 * i + 3];
        __m512 ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        __m512 cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        four[i] = _mm512_add_ps((__m512)_mm512_unpacklo_pd((__m512d)ab, (__m512d)cd),
                                (__m512)_mm512_unpackhi_pd((__m512d)ab, (__m512d)cd));
    }
    __m512 x = _mm512_add_ps(_mm512_shuffle_f32x4(four[0], four[1], 0x44),
                             _mm512_shuffle_f32x4(four[0], four[1], 0xee));
    __m512 y = _mm512_add_ps(_mm512_shuffle_f32x4(four[2], four[3], 0x44),
                             _mm512_shuffle_f32x4(four[2], four[3], 0xee));
    return (floats)_mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
}
#elif defined(__AVX2__)
INLINE floats sums_of(const floats v[LANES]) {
    __m256 four[2];
    for (int i = 0; i < 2; i++)
        four[i] = _mm256_hadd_ps(_mm256_hadd_ps((__m256)v[4 * i], (__m256)v[4 * i + 1]),
                                 _mm256_hadd_ps((__m256)v[4 * i + 2], (__m256)v[4 * i + 3]));
    return (floats)_mm256_add_ps(_mm256_permute2f128_ps(four[0], four[1], 0x20),
                                 _mm256_permute2f128_ps(four[0], four[1], 0x31));
}
#else
INLINE floats sums_of(const floats v[LANES]) {
    floats result;
    for (int lane = 0; lane < LANES; lane++) result[lane] = sum(v[lane]);
    return result;
}
#endif

/* The type of packed queries: bfloat16 only if the processor multiplies pairs of bfloat16, else float32. */
#if defined(__AVX512BF16__)
INLINE int type_of_queries(int type) { return type; }
#else
INLINE int type_of_queries(int type) { return FLOAT32; }
#endif

/* scores[row][first ..] = the dot products of R queries with LANES keys. */
#define SCORE_ROWS(R)                                                                                                 \
    INLINE void score_rows_##R(const char *keys, const char *queries, int64_t size, int type,                         \
                               float scores[][KEYS_AT_ONCE], int64_t first) {                                     \
        int query_type = type_of_queries(type);                                                                       \
        int64_t width = size * bytes_of(type), query_width = size * bytes_of(query_type);                             \
        floats sums[R][LANES];                                                                                        \
        for (int t = 0; t < LANES; t++) {                                                                             \
            const char *key = keys + t * width;                                                                       \
            floats s[R];                                                                                              \
            int64_t i = 0;                                                                                            \
            for (int r = 0; r < R; r++) s[r] = all(0);                                                                \
            ADD_PAIRS_OF_KEY(R)                                                                                       \
            for (; i + LANES <= size; i += LANES) {                                                                   \
                floats entries = load(key, i, type);                                                                  \
                for (int r = 0; r < R; r++) s[r] += load(queries + r * query_width, i, query_type) * entries;         \
            }                                                                                                         \
            for (; i < size; i++)                                                                                     \
                for (int r = 0; r < R; r++)                                                                           \
                    s[r][0] += load_one(queries + r * query_width, i, query_type) * load_one(key, i, type);           \
            for (int r = 0; r < R; r++) sums[r][t] = s[r];                                                            \
        }                                                                                                             \
        for (int r = 0; r < R; r++) *(floats *)(scores[r] + first) = sums_of(sums[r]);                                \
    }
#if defined(__AVX512BF16__)
#define ADD_PAIRS_OF_KEY(R)                                                                                           \
    if (type == BFLOAT16)                                                                                             \
        for (; i + 32 <= size; i += 32) {                                                                             \
            __m512bh entries = (__m512bh)_mm512_loadu_si512(key + 2 * i);                                             \
            for (int r = 0; r < R; r++)                                                                               \
                s[r] = (floats)_mm512_dpbf16_ps(                                                                      \
                    (__m512)s[r], (__m512bh)_mm512_loadu_si512(queries + r * query_width + 2 * i), entries);          \
        }
#else
#define ADD_PAIRS_OF_KEY(R)
#endif
SCORE_ROWS(1) SCORE_ROWS(2) SCORE_ROWS(3) SCORE_ROWS(4)

/* Compute the dot products of `rows` queries with LANES keys, as scores[row][first ..]. Prefetches as many bytes from
   `soon` as the keys have. */
INLINE void score_keys(const char *keys, const char *queries, int rows, int64_t size, int type,
                       float scores[][KEYS_AT_ONCE], int64_t first, const char *soon) {
    int64_t query_width = size * bytes_of(type_of_queries(type));
    for (int64_t at = 0; at < LANES * size * bytes_of(type); at += LINE_BYTES) prefetch_soon(soon + at);
    int row = 0;
    for (; row + 4 <= rows; row += 4) score_rows_4(keys, queries + row * query_width, size, type, scores + row, first);
    const char *left = queries + row * query_width;
    switch (rows - row) {
    case 1: score_rows_1(keys, left, size, type, scores + row, first); break;
    case 2: score_rows_2(keys, left, size, type, scores + row, first); break;
    case 3: score_rows_3(keys, left, size, type, scores + row, first); break;
    }
}

/* result[row] += sum over t of weights[row][t] * values[t]; V vectors of R rows at a time. Prefetches as many bytes
   from `soon` as the values have. */
#define ADD_VALUES(R, V)                                                                                              \
    INLINE void add_values_##R##x##V(const char *values, int64_t width, int64_t tokens, int64_t at, int type,         \
                                     float weights[][KEYS_AT_ONCE], float *result, int64_t result_stride,         \
                                     const char *soon) {                                                              \
        floats sums[R][V];                                                                                            \
        for (int r = 0; r < R; r++)                                                                                   \
            for (int v = 0; v < V; v++) sums[r][v] = *(floats *)(result + r * result_stride + at + v * LANES);        \
        for (int64_t t = 0; t < tokens; t++) {                                                                        \
            for (int64_t line = 0; line < V * LANES * bytes_of(type); line += LINE_BYTES)                             \
                prefetch_soon(soon + t * width + at * bytes_of(type) + line);                                         \
            floats entries[V];                                                                                        \
            for (int v = 0; v < V; v++) entries[v] = load(values + t * width, at + v * LANES, type);                  \
            for (int r = 0; r < R; r++)                                                                               \
                for (int v = 0; v < V; v++) sums[r][v] += entries[v] * weights[r][t];                                 \
        }                                                                                                             \
        for (int r = 0; r < R; r++)                                                                                   \
            for (int v = 0; v < V; v++) *(floats *)(result + r * result_stride + at + v * LANES) = sums[r][v];        \
    }
#define ALL_VALUES(R, V)                                                                                              \
    for (; at + V * LANES <= size; at += V * LANES)                                                                   \
        add_values_##R##x##V(values, width, tokens, at, type, weights + row, to, stride, soon);                       \
    for (; at + LANES <= size; at += LANES)                                                                           \
        add_values_##R##x1(values, width, tokens, at, type, weights + row, to, stride, soon);

/* Block sizes: as many sums as fit into registers, as in products.h. */
ADD_VALUES(1, 4) ADD_VALUES(2, 4)
ADD_VALUES(1, 1) ADD_VALUES(2, 1) ADD_VALUES(3, 1) ADD_VALUES(4, 1)
#if LANES == 16
#define MAX_ROWS_OF_VALUES 4
ADD_VALUES(3, 4) ADD_VALUES(4, 4)
#else
#define MAX_ROWS_OF_VALUES 6
ADD_VALUES(3, 2) ADD_VALUES(4, 2) ADD_VALUES(5, 2) ADD_VALUES(6, 2) ADD_VALUES(5, 1) ADD_VALUES(6, 1)
#endif

/* The same for all rows and entries of values. The weight of token t is weights[row][first + t]. */
INLINE void add_values(const char *values, int rows, int64_t size, int64_t tokens, int type,
                       float all_weights[][KEYS_AT_ONCE], int64_t first, float *result, const char *soon) {
    int64_t width = size * bytes_of(type), stride = MAX_HEAD_SIZE;
    float (*weights)[KEYS_AT_ONCE] = (float (*)[KEYS_AT_ONCE])(all_weights[0] + first);
    for (int row = 0; row < rows; row += MAX_ROWS_OF_VALUES, soon = values) {
        int count = rows - row < MAX_ROWS_OF_VALUES ? rows - row : MAX_ROWS_OF_VALUES;
        int64_t at = 0;
        float *to = result + row * stride;
        switch (count) {
        case 1: ALL_VALUES(1, 4) break;
        case 2: ALL_VALUES(2, 4) break;
#if LANES == 16
        case 3: ALL_VALUES(3, 4) break;
        default: ALL_VALUES(4, 4)
#else
        case 3: ALL_VALUES(3, 2) break;
        case 4: ALL_VALUES(4, 2) break;
        case 5: ALL_VALUES(5, 2) break;
        default: ALL_VALUES(6, 2)
#endif
        }
        for (; at < size; at++)
            for (int r = 0; r < count; r++)
                for (int64_t t = 0; t < tokens; t++)
                    to[r * stride + at] += weights[row + r][t] * load_one(values + t * width, at, type);
    }
}

/* Query rows of one kv head and the keys that they attend to. Query row r has position[r] and sees the keys up to this
   position.

   blocks     blocks of the sequence; entries of blocks that no row sees are not read
   queries    [rows][head_size], packed, in type_of_queries
   slopes     [rows] slope of each row's query head; read only if Scores has slopes
   first_key, end_key   range of keys to read; first_key is a multiple of KEYS_AT_ONCE
   next_keys  the page of keys that this thread will probably read next; prefetched */
typedef struct {
    int64_t layer, head;
    const int32_t *blocks;
    const char *queries;
    const int64_t *position;
    const float *slopes;
    int rows;
    int64_t first_key, end_key;
    const char *next_keys;
} Task;

/* Adjacent keys of one page, and their values.

   first    index of the first of them among KEYS_AT_ONCE keys
   soon     keys to read next; prefetched */
typedef struct {
    const char *keys, *values, *soon;
    int64_t first, tokens;
} Piece;

/* Up to KEYS_AT_ONCE keys that query rows read together: of a page, or of several.

   pieces     those that some row sees, ascending
   tokens     number of keys up to the last one that a row sees
   is_whole   every row sees all of KEYS_AT_ONCE keys */
typedef struct {
    Piece pieces[KEYS_AT_ONCE / MIN_BLOCK_TOKENS];
    int num_pieces;
    int64_t tokens;
    int is_whole;
} Keys;

/* Return the end of the range of keys to read; `last` is the last position of the rows. */
INLINE int64_t end_of(const Task *task, int64_t last) { return last < task->end_key ? last + 1 : task->end_key; }

INLINE const char *entry_of(const Cache *c, const Task *task, int64_t key, int is_value) {
    return page_of(c, task->blocks[key / c->block_tokens], task->layer, is_value, task->head)
           + key % c->block_tokens * c->head_size * bytes_of(c->type);
}

/* Describe the keys from `start` on, for rows at positions `first` to `last`. Returns whether any row sees one. */
INLINE int find_keys(const Cache *c, const Scores *how, const Task *task, int64_t first, int64_t last, int64_t start,
                     Keys *found) {
    int64_t next = start + KEYS_AT_ONCE, end = end_of(task, last);
    found->is_whole = next <= first + 1 && (!how->window || start > last - how->window);
    if (next > end) next = end;
    found->tokens = next - start;
    found->num_pieces = 0;
    for (int64_t key = start, until; key < next; key = until) {
        until = (key / c->block_tokens + 1) * c->block_tokens;
        if (until > next) until = next;
        if (how->window && until <= first - how->window + 1 && key >= how->sinks) continue;
        const char *soon = key + KEYS_AT_ONCE < end ? entry_of(c, task, key + KEYS_AT_ONCE, 0) : task->next_keys;
        found->pieces[found->num_pieces++] = (Piece){entry_of(c, task, key, 0), entry_of(c, task, key, 1), soon,
                                                     key - start, until - key};
    }
    return found->num_pieces > 0;
}

static __thread char wide_entries[2][KEYS_AT_ONCE * MAX_HEAD_SIZE * 4] __attribute__((aligned(64)));

/* Widen keys and values in FP8 to `type`, in memory of this thread, to which `found` points then. Attention over them
   has the bits of a cache that holds the wide numbers. Prefetches the next keys and values. */
__attribute__((noinline))
static void widen_keys(const Cache *c, Keys *found, int type) {
    int64_t size = c->head_size;
    for (Piece *piece = found->pieces; piece < found->pieces + found->num_pieces; piece++) {
        int64_t count = (piece->tokens + MIN_BLOCK_TOKENS - 1) / MIN_BLOCK_TOKENS * MIN_BLOCK_TOKENS * size;
        char *keys = wide_entries[0] + piece->first * size * bytes_of(type);
        char *values = wide_entries[1] + piece->first * size * bytes_of(type);
        for (int64_t at = 0; at < count; at += LINE_BYTES) {
            prefetch_soon(piece->soon + at);
            prefetch_soon(piece->soon + c->kv_heads * page_bytes(c) + at);
        }
        if (type == FLOAT32) {
            widen_row_of_fp8((const uint8_t *)piece->keys, keys, count, FLOAT32);
            widen_row_of_fp8((const uint8_t *)piece->values, values, count, FLOAT32);
        } else {
            widen_row_of_fp8((const uint8_t *)piece->keys, keys, count, BFLOAT16);
            widen_row_of_fp8((const uint8_t *)piece->values, values, count, BFLOAT16);
        }
        piece->keys = keys, piece->values = piece->soon = values;
    }
}

/* Partial results of query rows: sums of values weighted by e^(score - maximum), and the sums of the weights. */
typedef struct {
    float sums[MAX_QUERY_ROWS][MAX_HEAD_SIZE] __attribute__((aligned(64)));
    float maximum[MAX_QUERY_ROWS], total[MAX_QUERY_ROWS];
} Partial;

/* Merge `other` into `partial`. A row that sees no key of `other` keeps its result. */
__attribute__((noinline))
static void merge_partial(Partial *partial, const Partial *other, int rows, int64_t size) {
    for (int row = 0; row < rows; row++) {
        if (other->total[row] == 0) continue;
        float top = partial->maximum[row] > other->maximum[row] ? partial->maximum[row] : other->maximum[row];
        floats shrink = exponential(all(partial->maximum[row] - top));
        floats shrink_other = exponential(all(other->maximum[row] - top));
        partial->maximum[row] = top;
        partial->total[row] = fused(all(other->total[row]), shrink_other, all(partial->total[row]) * shrink)[0];
        for (int64_t i = 0; i < size; i += LANES) {
            floats *sums = (floats *)(partial->sums[row] + i);
            *sums = fused(*(const floats *)(other->sums[row] + i), shrink_other, *sums * shrink);
        }
    }
}

/* Attend to the keys of the task. Overwrites `partial`. */
INLINE void attend(const Cache *c, const Scores *how, const Task *task, Partial *partial, int type) {
    float scores[MAX_QUERY_ROWS][KEYS_AT_ONCE] __attribute__((aligned(64)));
    const int64_t *position = task->position;
    float *maximum = partial->maximum, *total = partial->total, *result = partial->sums[0];
    int rows = task->rows;
    int64_t size = c->head_size, width = size * bytes_of(type), first = position[0], last = position[0];
    for (int row = 0; row < rows; row++) {
        maximum[row] = -1e30f;
        total[row] = 0;
        first = position[row] < first ? position[row] : first;
        last = position[row] > last ? position[row] : last;
        memset(result + row * MAX_HEAD_SIZE, 0, sizeof(float) * (size_t)size);
    }
    int64_t end = end_of(task, last);
    Keys found;
    for (int64_t start = task->first_key; start < end; start += KEYS_AT_ONCE) {
        if (!find_keys(c, how, task, first, last, start, &found)) continue;
        if (c->type == FP8) widen_keys(c, &found, type);
        int64_t whole = (found.tokens + LANES - 1) / LANES * LANES;
        for (const Piece *piece = found.pieces; piece < found.pieces + found.num_pieces; piece++)
            for (int64_t t = 0; t < piece->tokens; t += LANES)
                score_keys(piece->keys + t * width, task->queries, rows, size, type, scores, piece->first + t,
                           piece->values + t * width);
        for (int row = 0; row < rows; row++) {
            floats most = all(-1e30f);
            for (int64_t t = 0; t < whole; t += LANES) {
                floats *at = (floats *)(scores[row] + t);
                *at = masked_scores(*at, how, FIRST_INTEGERS + (int32_t)(start + t),
                                    all_integers((int32_t)position[row]),
                                    all(how->slopes ? task->slopes[row] : 0), found.is_whole);
                most = larger(*at, most);
            }
            float top = largest(most);
            if (top > maximum[row]) {
                float shrink = exponential(all(maximum[row] - top))[0];
                maximum[row] = top;
                total[row] *= shrink;
                for (int64_t i = 0; i < size; i += LANES) *(floats *)(result + row * MAX_HEAD_SIZE + i) *= shrink;
            }
            floats sums = all(0);
            for (int64_t t = 0; t < whole; t += LANES) {
                floats p = exponential(*(floats *)(scores[row] + t) - maximum[row]);
                *(floats *)(scores[row] + t) = p;
                sums += p;
            }
            total[row] += sum(sums);
        }
        for (const Piece *piece = found.pieces; piece < found.pieces + found.num_pieces; piece++)
            add_values(piece->values, rows, size, piece->tokens, type, scores, piece->first, result, piece->soon);
    }
}
