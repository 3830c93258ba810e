/* y = x W^T for a matrix W in the blocks of a GGUF file, or in groups with a scale and a zero point. Nothing of W is
   rounded.

   A block has 32 inputs of an output: whole numbers, the levels, and a scale, or one for each half. Types with a minimum
   add it to each level times scale. A panel has the blocks of 16 outputs. Their scales, and minima, fill a line of 64
   bytes, with those of one, two or four blocks. The levels of these blocks follow. In K types, scales are bytes, and their factors,
   which eight blocks share, follow all blocks. Groups (INT4, INT8) have one or more blocks. Their scales, of the type
   that the file has, follow all blocks, each 16 with their zero points, which are subtracted from the levels.

   Levels are stored as lines of [16 outputs][2 words]. The inputs 2p and 2p + 1 are pair p of a block: its words are
     2 bits     bits v and v + 1 of line p / 8
     3 bits     these, and bit u of one more line
     4 bits     nibble p % 4 of line p / 4
     5 bits     the nibble, and bit u of one more line
     6 bits     the nibble, and bits v and v + 1 of one of two more lines, p / 8
     8 bits     byte p / 2 % 2 of line p / 4 * 2 + p % 2
   where bit_of and two_bits_of choose u and v so that the bytes of a line have the same inputs in all types.

   Rows of x are prepared: in each block of 32 numbers, fixed point with 15 bits and a sign, and the power of two that
   this needs. A bfloat16 number is rounded only if it is below 1/128 of the largest of its block. Of a float32 number,
   fixed point has 23 bits: a first word, rounded down, and the other 8 bits as a second word. A product of a block is a
   sum of whole numbers, which has no order. So the bits of a row of y do not depend on the other rows, the number of
   threads or the instruction set. Each result is
     sum = fma(block, scale of W * scale of x, sum)
     sum = fma(minimum, sum of x in the block, sum)        in types with a minimum, or of x in each half (Q2_K)
   over the blocks in ascending order, where block is fma(second, 2^-8, first) for two words.

   With quantized_activations="int8", a number of x is rounded to a byte, as llama.cpp does: its block has the scale
   largest / 127, and the sums are those of the rounded numbers. All else is the same, also in bits. */
#pragma once
#include "matrix.h"

#define BLOCK_INPUTS 32
#define BLOCKS_OF_A_FACTOR 8
#define MAX_QUANTISED_ROWS 8           /* of a kernel */
#define MAX_QUANTISED_PANELS 2
/* Bytes: the hardware prefetcher stops at the end of a page. Few lines at a time can come to the nearest cache. If they
   came from memory, rows of x that do not fit there would wait for them. */
#define PREFETCHED_AHEAD 16384
#define NEAREST_AHEAD 2048            /* a single row reads levels faster than they come from the second cache */

/* Types, numbered as in Python. */
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ4_NL, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_XS, INT4, INT8, NUM_TYPES };

INLINE int is_k(int type) { return type >= Q2_K && type <= IQ4_XS; }
INLINE int in_groups(int type) { return type == INT4 || type == INT8; }
INLINE int has_bytes(int type) { return type == Q8_0 || type == INT8; }
INLINE int has_minimum(int type) {
    return type == Q4_1 || type == Q5_1 || type == Q2_K || type == Q4_K || type == Q5_K;
}
/* Levels are places in a table. */
INLINE int in_table(int type) { return type == IQ4_NL || type == IQ4_XS; }
static const int16_t table_of_levels[32] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
INLINE int level_bits(int type) {
    return has_bytes(type) ? 8 : type == Q2_K ? 2 : type == Q3_K ? 3 : type == Q6_K ? 6 : type == Q5_0 || type == Q5_1 || type == Q5_K ? 5 : 4;
}
/* Levels are signed bytes, once they are looked up. */
INLINE int is_signed(int type) { return has_bytes(type) || in_table(type); }
/* The place of a bit, and of two bits, of pair p in a word. */
INLINE int bit_of(int p) { return p / 2 % 2 * 8 + p / 4 * 2 + p % 2; }
INLINE int two_bits_of(int p) { return p / 2 % 2 * 8 + (p / 4 * 2 + p % 2) % 4 * 2; }
/* What is subtracted from stored levels. */
INLINE int offset_of(int type) {
    return type == Q4_0 ? 8 : type == Q5_0 ? 16 : type == Q6_K ? 32 : type == Q3_K ? 4 : 0;
}
INLINE int scales_per_block(int type) { return type == Q2_K || type == Q3_K || type == Q6_K ? 2 : 1; }
INLINE int level_bytes(int type) { return level_bits(type) * LINE_BYTES; }
INLINE int scale_bytes(int type) {
    return type == Q4_1 || type == Q5_1 ? LINE_BYTES : type == IQ4_XS ? PANEL : LINE_BYTES / 2;
}
INLINE int blocks_per_line(int type) { return in_groups(type) ? 1 : LINE_BYTES / scale_bytes(type); }
INLINE int line_bytes(int type) { return in_groups(type) ? 0 : LINE_BYTES; }           /* before the levels */
INLINE int zero_bytes(int type) { return type == INT4 ? 1 : 2; }
INLINE int64_t blocks_of_a_factor(const QuantisedPart *part) {
    return in_groups((int)part->type) ? part->group_blocks : BLOCKS_OF_A_FACTOR;
}
/* Of 16 outputs. */
INLINE int factor_bytes(const QuantisedPart *part) {
    int type = (int)part->type;
    if (in_groups(type)) return PANEL * ((int)bytes_of((int)part->scale_type) + zero_bytes(type));
    return !is_k(type) ? 0 : has_minimum(type) ? LINE_BYTES : LINE_BYTES / 2;
}
INLINE int64_t group_bytes(int type) { return line_bytes(type) + blocks_per_line(type) * level_bytes(type); }
INLINE int64_t scales_at(int type, int64_t block) {
    return block / blocks_per_line(type) * group_bytes(type) + block % blocks_per_line(type) * scale_bytes(type);
}
INLINE int64_t levels_at(int type, int64_t block) {
    return block / blocks_per_line(type) * group_bytes(type) + line_bytes(type)
           + block % blocks_per_line(type) * level_bytes(type);
}
INLINE int64_t factors_at(int type, int64_t blocks) {
    return (blocks + blocks_per_line(type) - 1) / blocks_per_line(type) * group_bytes(type);
}

INLINE int64_t num_factors(const QuantisedPart *part, int64_t inputs) {
    return (inputs / BLOCK_INPUTS + blocks_of_a_factor(part) - 1) / blocks_of_a_factor(part);
}

/* Reads the type of a part, and of groups their blocks and the type of their scales. */
INLINE int64_t bytes_of_panel(const QuantisedPart *part, int64_t inputs) {
    int64_t bytes = factors_at((int)part->type, inputs / BLOCK_INPUTS) + num_factors(part, inputs) * factor_bytes(part);
    return (bytes + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
}

INLINE float from_half(uint16_t half) {
    uint32_t size = (uint32_t)(half & 0x7fff) << 13, bits;
    float value;
    memcpy(&value, &size, 4);
    value *= 0x1p112f;
    memcpy(&bits, &value, 4);
    if ((half & 0x7c00) == 0x7c00) bits = size | 0x7f800000;
    bits |= (uint32_t)(half & 0x8000) << 16;
    memcpy(&value, &bits, 4);
    return value;
}

INLINE floats from_halves(const void *from) {
#if LANES == 16
    return (floats)_mm512_cvtph_ps(_mm256_loadu_si256(from));
#elif LANES == 8
    return (floats)_mm256_cvtph_ps(_mm_loadu_si128(from));
#else
    words half = __builtin_convertvector(*(const halves *)from, words), size = (half & 0x7fff) << 13;
    words bits = (words)((floats)size * 0x1p112f), is_special = (words)((half & 0x7c00) == 0x7c00);
    return (floats)((bits & ~is_special) | ((size | 0x7f800000) & is_special) | (half & 0x8000) << 16);
#endif
}

/* GCC takes many instructions for these conversions by itself. */
INLINE floats from_bytes(const uint8_t *from, int is_signed) {
#if LANES == 16
    __m128i found = _mm_loadu_si128((const void *)from);
    return (floats)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(found) : _mm512_cvtepu8_epi32(found));
#elif LANES == 8
    __m128i found = _mm_loadl_epi64((const void *)from);
    return (floats)_mm256_cvtepi32_ps(is_signed ? _mm256_cvtepi8_epi32(found) : _mm256_cvtepu8_epi32(found));
#else
    floats found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = is_signed ? (float)(int8_t)from[lane] : (float)from[lane];
    return found;
#endif
}

typedef int8_t signed_octets __attribute__((vector_size(LANES), aligned(1)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES), aligned(2)));
typedef uint16_t pairs __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int16_t signed_pairs __attribute__((vector_size(4 * LANES), aligned(4)));

/* Has a sum of products in its register now. GCC would compute all products first, and write them to memory. */
#if defined(__x86_64__)
#define SUM_NOW(sum) __asm__("" : "+v"(sum))
#elif defined(__aarch64__)
#define SUM_NOW(sum) __asm__("" : "+w"(sum))
#else
#define SUM_NOW(sum) ((void)0)
#endif

/* sums + the products of two words of x with the pairs of words of W. */
INLINE integers add_word_pairs(integers sums, pairs w, integers x) {
#if defined(__AVX512VNNI__)
    return (integers)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#elif LANES == 16 && defined(__AVX512BW__)
    sums += (integers)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif LANES == 8
    sums += (integers)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSE2__)
    typedef int16_t eight __attribute__((vector_size(16)));
    sums += (integers)__builtin_ia32_pmaddwd128((eight)w, (eight)x);
#else
    sums += ((integers)((words)w << 16) >> 16) * ((integers)((words)x << 16) >> 16)
            + ((integers)w >> 16) * (x >> 16);
#endif
    SUM_NOW(sums);
    return sums;
}

/* ---------------------------------------------------------------- rows of x */

/* A block of a prepared row. Before the first of these are the words of all blocks, then their second words for
   float32. With byte products, bytes take the place of words for float32, and follow them for bfloat16: of each 8
   inputs, the lower and the upper bytes of 0, 4, 1, 5, then of 2, 6, 3, 7; and second words in the same order. */
typedef struct {
    float scale;                      /* of the first words; NaN if a number of the block is not finite */
    float total, totals[2];           /* sum of the numbers, and of each half */
    int32_t sums[2];                  /* of the words, or bytes, of each half of the block */
    union {
        struct { int32_t upper_sum; int16_t second_sums[2]; };  /* of upper bytes of words; of second words, as sums */
        struct { int32_t minus_8, minus_128; };                 /* for bytes: -8 and -128 times their sum */
    };
} RowBlock;

#if LANES == 16 && defined(__AVX512VNNI__)
#define HAS_BYTE_PRODUCTS 1           /* see multiply_panels */
#else
#define HAS_BYTE_PRODUCTS 0
#endif

/* A kind of prepared rows, beside FLOAT32 and BFLOAT16: rounded to bytes. A block is a RowBlock, whose first sums are
   those of the bytes, and 32 bytes. Of each 8 inputs, these are 0, 4, 1, 5, then 2, 6, 3, 7, as in lines of levels. */
enum { BYTES = 2 };
INLINE int rows_of_matrix(const Matrix *m) { return m->has_byte_rows ? BYTES : m->type; }

INLINE int words_per_number(int type) { return type == FLOAT32 ? 2 : 1; }

typedef struct {
    const int16_t *words[2];
    const RowBlock *blocks;
} PreparedRow;

INLINE PreparedRow prepared_row(const void *row, int64_t inputs, int type) {
    const int16_t *first = (const int16_t *)row;
    if (type == BYTES) return (PreparedRow){{}, (const RowBlock *)row};
    return (PreparedRow){{first, first + inputs}, (const RowBlock *)(first + 2 * inputs)};
}

INLINE const RowBlock *block_of(const PreparedRow *row, int64_t b, int type) {
    return row->blocks + (type == BYTES ? 2 * b : b);
}

INLINE floats rounded(floats x) { return (x + 0x1.8p23f) - 0x1.8p23f; }
INLINE int32_t sum_of(integers v) {
#if LANES == 16
    return _mm512_reduce_add_epi32((__m512i)v);
#else
    int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += v[lane];
    return total;
#endif
}

#if LANES >= 8
/* Of each 8 bytes, 0, 4, 1, 5, then 2, 6, 3, 7. */
INLINE __m256i in_order_of_lines(__m256i bytes) {
    return _mm256_shuffle_epi8(bytes, _mm256_broadcastsi128_si256(
        _mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15)));
}
#endif

/* Write the bytes and the RowBlock of a block. top: the bits of the largest size of a number. */
INLINE void prepare_bytes(const void *from, RowBlock *block, uint32_t top, int type) {
    int8_t bytes[BLOCK_INPUTS] = {};
    float largest, scale = NAN;
    memcpy(&largest, &top, 4);
    block->sums[0] = block->sums[1] = 0;
    if (top < 0x7f800000) {
        if (largest < 0x1p-100f) largest = 0x1p-100f;      /* no scale and no product with one is denormal */
        scale = largest / 127.0f;
        floats factor = all(127.0f / largest);
        for (int half = 0; half < 2; half++) {
            integers sum = {};
            for (int i = half * BLOCK_INPUTS / 2; i < (half + 1) * BLOCK_INPUTS / 2; i += LANES) {
                /* Nearest, ties to even: the last bits of the sum are the whole number. */
                integers whole = (integers)fused(load(from, i, type), factor, all(0x1.8p23f)) - 0x4b400000;
                *(signed_octets *)(bytes + i) = __builtin_convertvector(whole, signed_octets);
                sum += whole;
            }
            block->sums[half] = sum_of(sum);
        }
    }
    int32_t sum = block->sums[0] + block->sums[1];
    block->minus_8 = -8 * sum, block->minus_128 = -128 * sum;
    block->scale = scale, block->total = (float)sum * scale;
    for (int half = 0; half < 2; half++) block->totals[half] = (float)block->sums[half] * scale;
    uint8_t *to = (uint8_t *)(block + 1);
#if LANES >= 8
    _mm256_storeu_si256((void *)to, in_order_of_lines(_mm256_loadu_si256((const void *)bytes)));
#else
    for (int i = 0; i < BLOCK_INPUTS; i++) to[i] = (uint8_t)bytes[i / 8 * 8 + i % 2 * 4 + i % 4 / 2 + i % 8 / 4 * 2];
#endif
}

/* Prepare a row of `size` numbers, and zeros up to the end of its last block; in bytes, or as words. */
INLINE void prepare_row(const void *x, void *to, int64_t size, int in_bytes, int type) {
    const int64_t blocks = (size + BLOCK_INPUTS - 1) / BLOCK_INPUTS, whole = size / BLOCK_INPUTS * BLOCK_INPUTS;
    PreparedRow row = prepared_row(to, blocks * BLOCK_INPUTS, in_bytes ? BYTES : type);
    float last[BLOCK_INPUTS] = {};
    if (whole < size) memcpy(last, (const char *)x + whole * bytes_of(type), (size - whole) * bytes_of(type));
    for (int64_t b = 0; b < blocks; b++) {
        RowBlock *block = (RowBlock *)block_of(&row, b, in_bytes ? BYTES : type);
        const void *from = b * BLOCK_INPUTS < whole ? (const char *)x + b * BLOCK_INPUTS * bytes_of(type)
                                                    : (const char *)last;
        words most = {};
        for (int i = 0; i < BLOCK_INPUTS; i += LANES) {
            words size = (words)load(from, i, type) & 0x7fffffff, is_larger = (words)(size > most);
            most = (size & is_larger) | (most & ~is_larger);
        }
        uint32_t top = most[0];
        for (int lane = 1; lane < LANES; lane++) top = most[lane] > top ? most[lane] : top;
        if (in_bytes) {
            prepare_bytes(from, block, top, type);
            continue;
        }
        int exponent = (int)(top >> 23) - 127;
        if (exponent < -100) exponent = -100;              /* no scale and no product with one is denormal */
        float scale = NAN, factor = 0, smallest = 0;
        if (top < 0x7f800000) {
            uint32_t up = (uint32_t)(14 - exponent + 127) << 23, down = (uint32_t)(exponent - 14 + 127) << 23;
            memcpy(&factor, &up, 4);
            memcpy(&scale, &down, 4);
        }
        smallest = type == FLOAT32 ? scale * 0x1p-8f : scale;
        int64_t total = 0;
        for (int half = 0; half < 2; half++) {
            integers first_sum = {}, second_sum = {};
            for (int i = half * BLOCK_INPUTS / 2; i < (half + 1) * BLOCK_INPUTS / 2; i += LANES) {
                floats v = load(from, i, type) * factor;
                v = -larger(-larger(v, all(-0x1p15f)), all(0x1p-8f - 0x1p15f));
                floats first = rounded(v);
                integers whole = __builtin_convertvector(first, integers);
                if (type == FLOAT32) {
                    integers second = __builtin_convertvector(rounded((v - first) * 0x1p8f), integers);
                    whole += second >> 8, second &= 255;
                    *(shorts *)(row.words[1] + b * BLOCK_INPUTS + i) = __builtin_convertvector(second, shorts);
                    second_sum += second;
                }
                *(shorts *)(row.words[0] + b * BLOCK_INPUTS + i) = __builtin_convertvector(whole, shorts);
                first_sum += whole;
            }
            block->sums[half] = sum_of(first_sum);
            block->second_sums[half] = (int16_t)sum_of(second_sum);
            int64_t sum = type == FLOAT32 ? (int64_t)block->sums[half] * 256 + block->second_sums[half]
                                          : block->sums[half];
            block->totals[half] = (float)sum * smallest;
            total += sum;
        }
#if HAS_BYTE_PRODUCTS
        __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 2, 10, 1, 9, 3, 11, 4, 12, 6, 14, 5, 13, 7, 15));
        __m512i bytes = _mm512_shuffle_epi8(_mm512_loadu_si512(row.words[0] + b * BLOCK_INPUTS), order);
        if (type == FLOAT32) {
            __m256i last = _mm512_cvtepi16_epi8(_mm512_loadu_si512(row.words[1] + b * BLOCK_INPUTS));
            _mm256_storeu_si256((void *)(row.words[1] + b * BLOCK_INPUTS / 2), in_order_of_lines(last));
        }
        _mm512_storeu_si512((void *)(row.words[type != FLOAT32] + b * BLOCK_INPUTS), bytes);
        __m512i upper = _mm512_maskz_mov_epi32(0xaaaa, bytes);
        block->upper_sum = sum_of((integers)_mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), upper));
#endif
        block->scale = scale;
        block->total = (float)total * smallest;
    }
}

/* ---------------------------------------------------------------- products */

/* Kernels multiply as many rows at a time as fit into registers, see panel_kernels.h. */
typedef struct {
    void (*of[3][4])(const Matrix *, const QuantisedPart *, const char *, int64_t, const Target *, int64_t, int64_t);
} PanelKernels;
/* min_row: of the first row. Later rows find the panels in the cache. Two of them at once come from memory slowly. */
static const struct { int rows, panels, min_row; } kernel_sizes[3][4] = {
#if LANES == 16
    {{1, 1, 0}, {2, 1, 0}, {4, 2, 0}, {}}, {{1, 1, 0}, {4, 1, 0}, {8, 1, 0}, {8, 2, 8}},
    {{1, 1, 0}, {4, 1, 0}, {8, 1, 0}, {}}};
#else
    {{1, 1, 0}, {4, 1, 0}, {}, {}}, {{1, 1, 0}, {4, 1, 0}, {}, {}}, {{1, 1, 0}, {4, 1, 0}, {}, {}}};
#endif
