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
   this needs. A bfloat16 number is rounded only if it is below 1/128 of the largest of its block. For float32, a second
   word has the rest. A product of a block is a sum of whole numbers, which has no order. So the bits of a row of y do
   not depend on the other rows, the number of threads or the instruction set. Each result is
     sum = fma(block, scale of W * scale of x, sum)
     sum = fma(minimum, sum of x in the block, sum)        in types with a minimum, or of x in each half (Q2_K)
   over the blocks in ascending order, where block is fma(second, 2^-15, first) for two words.

   With quantized_activations="int8", a number of x is rounded to a byte, as llama.cpp does: its block has the scale
   largest / 127, and the sums are those of the rounded numbers. All else is the same, also in bits. */
#pragma once
#include "matrix.h"

#define BLOCK_INPUTS 32
#define BLOCKS_OF_A_FACTOR 8
#define MAX_QUANTISED_ROWS 8           /* of a kernel */
#define MAX_QUANTISED_PANELS 2
#define PREFETCHED_AHEAD 8192         /* bytes: the hardware prefetcher stops at the end of a page */

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
int64_t quantised_panel_bytes(const QuantisedPart *part, int64_t inputs) {
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

/* sums + the products of two words of x with the pairs of words of W. */
INLINE integers add_word_pairs(integers sums, pairs w, integers x) {
#if defined(__AVX512VNNI__)
    return (integers)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
#elif LANES == 16 && defined(__AVX512BW__)
    return sums + (integers)_mm512_madd_epi16((__m512i)w, (__m512i)x);
#elif LANES == 8
    return sums + (integers)_mm256_madd_epi16((__m256i)w, (__m256i)x);
#elif defined(__SSE2__)
    typedef int16_t eight __attribute__((vector_size(16)));
    return sums + (integers)__builtin_ia32_pmaddwd128((eight)w, (eight)x);
#else
    return sums + ((integers)((words)w << 16) >> 16) * ((integers)((words)x << 16) >> 16)
           + ((integers)w >> 16) * (x >> 16);
#endif
}

/* ---------------------------------------------------------------- rows of x */

/* A block of a prepared row. Before the first of these are the words of all blocks, then their second words, for
   float32, or the bytes of the words in the order of in_byte_products, for bfloat16. */
typedef struct {
    float scale;                      /* of the first words; NaN if a number of the block is not finite */
    float total, totals[2];           /* sum of the numbers, and of each half */
    union {
        int32_t sums[2][2];           /* sums of the first and the second words, of each half of the block */
        struct { int32_t of_words[2], upper_sum; };    /* for bfloat16: sum of the upper bytes of the words */
        struct { int32_t of_bytes[2], minus_8, minus_128; };    /* for bytes: their sums, and -8 and -128 times these */
    };
} RowBlock;

#if LANES == 16 && defined(__AVX512VNNI__)
#define HAS_BYTE_PRODUCTS 1           /* see sum_in_bytes */
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

/* Write the bytes and the RowBlock of a block. top: the bits of the largest size of a number. */
INLINE void prepare_bytes(const void *from, RowBlock *block, uint32_t top, int type) {
    int8_t bytes[BLOCK_INPUTS] = {};
    float largest, scale = NAN;
    memcpy(&largest, &top, 4);
    block->of_bytes[0] = block->of_bytes[1] = 0;
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
            block->of_bytes[half] = sum_of(sum);
        }
    }
    int32_t sum = block->of_bytes[0] + block->of_bytes[1];
    block->minus_8 = -8 * sum, block->minus_128 = -128 * sum;
    block->scale = scale, block->total = (float)sum * scale;
    for (int half = 0; half < 2; half++) block->totals[half] = (float)block->of_bytes[half] * scale;
    uint8_t *to = (uint8_t *)(block + 1);
#if LANES >= 8
    __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 1, 5, 2, 6, 3, 7, 8, 12, 9, 13, 10, 14, 11, 15));
    _mm256_storeu_si256((void *)to, _mm256_shuffle_epi8(_mm256_loadu_si256((const void *)bytes), order));
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
        smallest = type == FLOAT32 ? scale * 0x1p-15f : scale;
        int64_t total = 0;
        for (int half = 0; half < 2; half++) {
            integers first_sum = {}, second_sum = {};
            for (int i = half * BLOCK_INPUTS / 2; i < (half + 1) * BLOCK_INPUTS / 2; i += LANES) {
                floats v = load(from, i, type) * factor, first = rounded(v);
                first = -larger(-larger(first, all(-32767.0f)), all(-32767.0f));
                integers whole = __builtin_convertvector(first, integers);
                *(shorts *)(row.words[0] + b * BLOCK_INPUTS + i) = __builtin_convertvector(whole, shorts);
                first_sum += whole;
                if (type != FLOAT32) continue;
                whole = __builtin_convertvector(rounded((v - first) * 0x1p15f), integers);
                *(shorts *)(row.words[1] + b * BLOCK_INPUTS + i) = __builtin_convertvector(whole, shorts);
                second_sum += whole;
            }
            block->sums[0][half] = sum_of(first_sum);
            block->sums[1][half] = sum_of(second_sum);
            int64_t sum = type == FLOAT32 ? ((int64_t)block->sums[0][half] << 15) + block->sums[1][half]
                                          : block->sums[0][half];
            block->totals[half] = (float)sum * smallest;
            total += sum;
        }
#if HAS_BYTE_PRODUCTS
        if (type != FLOAT32) {
            /* Of each 8 inputs, the lower and the upper bytes of 0, 4, 1, 5, then of 2, 6, 3, 7. */
            __m512i order = _mm512_broadcast_i32x4(
                _mm_setr_epi8(0, 8, 2, 10, 1, 9, 3, 11, 4, 12, 6, 14, 5, 13, 7, 15));
            __m512i bytes = _mm512_shuffle_epi8(_mm512_loadu_si512(row.words[0] + b * BLOCK_INPUTS), order);
            _mm512_storeu_si512((void *)(row.words[1] + b * BLOCK_INPUTS), bytes);
            __m512i upper = _mm512_maskz_mov_epi32(0xaaaa, bytes);
            __m512i sums = _mm512_dpbusd_epi32(_mm512_setzero_si512(), _mm512_set1_epi8(1), upper);
            block->upper_sum = sum_of((integers)sums);
        }
#endif
        block->scale = scale;
        block->total = (float)total * smallest;
    }
}

/* ---------------------------------------------------------------- products */

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNROLLED                      /* instrumented code would take minutes to compile */
#else
#define UNROLLED _Pragma("GCC unroll 16")
#endif

INLINE pairs line(const uint8_t *from) { return *(const pairs *)from; }
INLINE pairs shifted(pairs w, int right) { return right >= 0 ? w >> right : w << -right; }

/* table_of_levels[w] */
INLINE pairs looked_up(pairs w) {
#if LANES == 16 && defined(__AVX512BW__)
    return (pairs)_mm512_permutexvar_epi16((__m512i)w, _mm512_loadu_si512(table_of_levels));
#elif LANES == 8
    __m256i table = _mm256_broadcastsi128_si256(_mm_packs_epi16(_mm_loadu_si128((const void *)table_of_levels),
                                                                _mm_loadu_si128((const void *)(table_of_levels + 8))));
    return (pairs)((signed_pairs)((pairs)_mm256_shuffle_epi8(table, (__m256i)w) << 8) >> 8);
#else
    for (int lane = 0; lane < 2 * LANES; lane++) w[lane] = (uint16_t)table_of_levels[w[lane]];
    return w;
#endif
}

/* The same for bytes. */
INLINE words bytes_looked_up(words w) {
#if LANES == 8 || (LANES == 16 && defined(__AVX512BW__))
    __m128i table = _mm_packs_epi16(_mm_loadu_si128((const void *)table_of_levels),
                                    _mm_loadu_si128((const void *)(table_of_levels + 8)));
#if LANES == 8
    return (words)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table), (__m256i)w);
#else
    return (words)_mm512_shuffle_epi8(_mm512_broadcast_i32x4(table), (__m512i)w);
#endif
#else
    for (int lane = 0; lane < LANES; lane++) {
        uint32_t four = 0;
        for (int i = 0; i < 32; i += 8) four |= (uint32_t)(uint8_t)table_of_levels[w[lane] >> i & 15] << i;
        w[lane] = four;
    }
    return w;
#endif
}

/* The levels of pair p of LANES outputs, as stored. */
INLINE pairs levels_of(int type, const uint8_t *levels, int p) {
    if (has_bytes(type)) {
        signed_pairs both = (signed_pairs)line(levels + (p / 4 * 2 + p % 2) * LINE_BYTES);
        return (pairs)((p / 2 % 2 ? both : (signed_pairs)((pairs)both << 8)) >> 8);
    }
    if (level_bits(type) < 4) {
        pairs w = shifted(line(levels + p / 8 * LINE_BYTES), two_bits_of(p)) & 3;
        return level_bits(type) == 3 ? w | (shifted(line(levels + 2 * LINE_BYTES), bit_of(p) - 2) & 4) : w;
    }
    pairs w = shifted(line(levels + p / 4 * LINE_BYTES), p % 4 * 4);
    if (p % 4 < 3 || level_bits(type) > 4) w &= 15;
    if (level_bits(type) == 5) w |= shifted(line(levels + 4 * LINE_BYTES), bit_of(p) - 4) & 16;
    if (level_bits(type) == 6) w |= shifted(line(levels + (4 + p / 8) * LINE_BYTES), two_bits_of(p) - 4) & 48;
    return in_table(type) ? looked_up(w) : w;
}

/* The levels of line i of 8, as bytes, of LANES outputs: of the inputs 0, 4, 1, 5 (even i) or 2, 6, 3, 7 of 8. */
INLINE words bytes_of_line(int type, const uint8_t *levels, int i) {
    if (has_bytes(type)) return (words)line(levels + i * LINE_BYTES);
    if (level_bits(type) < 4) {
        words w = (words)shifted(line(levels + i / 4 * LINE_BYTES), i % 4 * 2) & 0x03030303;
        return level_bits(type) == 3 ? w | ((words)shifted(line(levels + 2 * LINE_BYTES), i - 2) & 0x04040404) : w;
    }
    words w = (words)shifted(line(levels + i / 2 * LINE_BYTES), i % 2 * 4) & 0x0f0f0f0f;
    const uint8_t *more = levels + (4 + (level_bits(type) == 6) * (i / 4)) * LINE_BYTES;
    if (level_bits(type) == 5) w |= (words)shifted(line(more), i - 4) & 0x10101010;
    if (level_bits(type) == 6) w |= (words)shifted(line(more), i % 4 * 2 - 4) & 0x30303030;
    return in_table(type) ? bytes_looked_up(w) : w;
}

/* start + the sums of the inputs in the lines `first` .. `first` + count - 1 of the bytes of the words of x, for LANES
   outputs: x = 256 upper + lower. Bytes of levels take half the instructions to unpack. The sums are those of words.
   For more rows than one, adding up two sums takes longer. */
INLINE integers sum_in_bytes(int type, const uint8_t *levels, int first, int count, const int32_t *x, integers start) {
#if HAS_BYTE_PRODUCTS
    __m512i lower = (__m512i)start, upper = _mm512_setzero_si512();
    UNROLLED for (int i = first; i < first + count; i++) {
        words w = bytes_of_line(type, levels, i);
        words positive = is_signed(type) ? w ^ 0x80808080 : w;        /* + 128, which upper_sum makes up for */
        lower = _mm512_dpbusd_epi32(lower, _mm512_set1_epi32(x[2 * i]), (__m512i)w);
        upper = _mm512_dpbusd_epi32(upper, (__m512i)positive, _mm512_set1_epi32(x[2 * i + 1]));
    }
    return (integers)lower + ((integers)upper << 8);
#else
    return start;
#endif
}

/* The number of lines whose products of bytes, each the sum of two, add up to at most 32,767. */
INLINE int lines_in_words(int type) {
    int most = is_signed(type) ? 1 : level_bits(type) == 6 ? 2 : level_bits(type) == 5 ? 4 : 8;
    return most < 8 / scales_per_block(type) ? most : 8 / scales_per_block(type);
}

/* sums + the products of line i of levels and four bytes of x. Without an instruction for this, `some` keeps the sums
   of two products in words, until lines_in_words lines are added. */
INLINE integers add_bytes(int type, integers sums, signed_pairs *some, int i, words w, int32_t x) {
#if HAS_BYTE_PRODUCTS
    if (is_signed(type)) w ^= 0x80808080;                  /* + 128, see byte_offset */
    return (integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, _mm512_set1_epi32(x));
#elif LANES == 8 || defined(__AVX512BW__)
    const int last = lines_in_words(type) - 1;
#if LANES == 8
    __m256i four = _mm256_set1_epi32(x), levels = (__m256i)w;
    if (is_signed(type)) four = _mm256_sign_epi8(four, levels), levels = _mm256_abs_epi8(levels);
    signed_pairs found = (signed_pairs)_mm256_maddubs_epi16(levels, four);
#else
    __m512i four = _mm512_set1_epi32(x), levels = (__m512i)w;
    if (is_signed(type)) {
        four = _mm512_mask_sub_epi8(four, _mm512_movepi8_mask(levels), _mm512_setzero_si512(), four);
        levels = _mm512_abs_epi8(levels);
    }
    signed_pairs found = (signed_pairs)_mm512_maddubs_epi16(levels, four);
#endif
    *some = i & last ? *some + found : found;
    return (i & last) == last ? add_word_pairs(sums, (pairs)*some, all_integers(0x10001)) : sums;
#else
    uint32_t upper = (uint32_t)(x >> 8 & 0xff00ff), lower = (uint32_t)(x & 0xff00ff);
    integers odd = (integers)((signed_pairs)(all_integers((int32_t)(upper << 8))) >> 8);
    integers even = (integers)((signed_pairs)(all_integers((int32_t)(lower << 8))) >> 8);
    sums = add_word_pairs(sums, (pairs)((signed_pairs)(w << 8) >> 8), even);
    return add_word_pairs(sums, (pairs)((signed_pairs)w >> 8), odd);
#endif
}

typedef struct { floats scale[2], minimum[2]; } Scales;

/* The factors of scales and minima, or the scales and zero points of a group, of LANES outputs. */
typedef struct { floats scale, minimum; integers zero; } Factors;

INLINE Factors factors_of(const int type, const QuantisedPart *part, const uint8_t *from, int first_output) {
    if (in_groups(type)) {
        int scale_type = (int)part->scale_type;
        const uint8_t *zeros = from + PANEL * bytes_of(scale_type) + first_output * zero_bytes(type);
        from += first_output * bytes_of(scale_type);
        Factors found = {scale_type == HALF ? from_halves(from) : load(from, 0, scale_type)};
        if (type == INT4) found.zero = __builtin_convertvector(from_bytes(zeros, 0), integers);
        else found.zero = __builtin_convertvector(*(const shorts *)zeros, integers);
        return found;
    }
    from += first_output * 2;
    return (Factors){from_halves(from), has_minimum(type) ? -from_halves(from + LINE_BYTES / 2) : all(0), {}};
}

/* The scales of a block of LANES outputs. `scales` points to those of the first of these outputs. */
INLINE Scales scales_of(int type, const uint8_t *scales, Factors factors) {
    Scales s = {};
    if (in_groups(type)) {
        s.scale[0] = factors.scale;
        return s;
    }
    if (!is_k(type)) {
        s.scale[0] = from_halves(scales);
        if (has_minimum(type)) s.minimum[0] = from_halves(scales + LINE_BYTES / 2);
        return s;
    }
    if (type == Q2_K)
        for (int half = 0; half < 2; half++) {
            integers both = __builtin_convertvector(from_bytes(scales + half * PANEL, 0), integers);
            s.scale[half] = factors.scale * __builtin_convertvector(both & 15, floats);
            s.minimum[half] = factors.minimum * __builtin_convertvector(both >> 4, floats);
        }
    else {
        s.scale[0] = factors.scale * from_bytes(scales, !has_minimum(type));
        if (scales_per_block(type) == 2) s.scale[1] = factors.scale * from_bytes(scales + PANEL, 1);
        if (has_minimum(type)) s.minimum[0] = factors.minimum * from_bytes(scales + PANEL, 0);
    }
    return s;
}

INLINE void prefetch_ahead(const void *line, int is_nearest) {
    if (is_nearest) prefetch(line);
    else prefetch_soon(line);
}

/* Multiply R rows with P adjacent panels, which share the loads of x. */
INLINE void multiply_panels(const int type, const int R, const int P, const int row_type, const Matrix *m,
                            const QuantisedPart *part, const char *x, int64_t row_bytes, const Target *t, int64_t row,
                            int64_t panel) {
    const int num_words = words_per_number(row_type);
    const int64_t blocks = m->inputs / BLOCK_INPUTS, panel_bytes = quantised_panel_bytes(part, m->inputs);
    const uint8_t *first = part->panels + (panel - part->first_panel) * panel_bytes;
    const int64_t shared = in_groups(type) ? part->group_blocks : BLOCKS_OF_A_FACTOR;
    const int is_in_bytes = R == 1 && row_type == BFLOAT16 && HAS_BYTE_PRODUCTS;
    const int offset = offset_of(type) + (row_type == BYTES && HAS_BYTE_PRODUCTS && is_signed(type) ? 128 : 0);
    /* On a Zen 5, one row takes 0.75 to 0.9 of the time with the nearest cache. Several rows fill it. */
    const int is_nearest = R == 1 && (LANES == 16 || row_type == BYTES);
    PreparedRow from[MAX_QUANTISED_ROWS];
    for (int r = 0; r < R; r++) from[r] = prepared_row(x + r * row_bytes, m->inputs, row_type);
    for (int v = 0; v < PARTS; v++) {
        floats sums[MAX_QUANTISED_ROWS][MAX_QUANTISED_PANELS];
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int q = 0; q < P; q++) sums[r][q] = all(0);
        Factors factors[MAX_QUANTISED_PANELS] = {};
        int64_t next_factors = factors_at(type, blocks), next_block = 0;       /* next_block has other factors */
        for (int64_t b = 0; b < blocks; b++) {
            if ((is_k(type) || in_groups(type)) && b == next_block) {
                UNROLLED for (int q = 0; q < P; q++) {
                    const uint8_t *here = first + q * panel_bytes + next_factors;
                    factors[q] = factors_of(type, part, here, v * LANES);
                    /* Those of the next panels are not in the stream of levels: each panel would wait for them. */
                    if (v == 0) prefetch_soon(here + P * panel_bytes);
                }
                next_factors += factor_bytes(part), next_block += shared;
            }
            int64_t ahead = PREFETCHED_AHEAD / P;
            if (P > 1 && levels_at(type, b) + ahead >= panel_bytes) ahead += (P - 1) * panel_bytes;
            const uint8_t *levels[MAX_QUANTISED_PANELS];
            Scales s[MAX_QUANTISED_PANELS];
            UNROLLED for (int q = 0; q < P; q++) {
                const uint8_t *start = first + q * panel_bytes;
                levels[q] = start + levels_at(type, b);
                if (v == 0) {
                    UNROLLED for (int i = 0; i < level_bits(type); i++)
                        prefetch_ahead(levels[q] + i * LINE_BYTES + ahead, is_nearest);
                    if (line_bytes(type) && b % blocks_per_line(type) == 0)
                        prefetch_ahead(levels[q] - LINE_BYTES + ahead, is_nearest);
                }
                levels[q] += v * LANES * 4;
                const int lane_bytes = is_k(type) ? 1 : 2;
                s[q] = scales_of(type, start + scales_at(type, b) + v * LANES * lane_bytes, factors[q]);
            }
            UNROLLED for (int half = 0; half < scales_per_block(type); half++) {
                integers found[MAX_QUANTISED_ROWS][2][MAX_QUANTISED_PANELS];
                UNROLLED for (int r = 0; r < R; r++)
                    UNROLLED for (int w = 0; w < num_words; w++) {
                        const RowBlock *block = block_of(&from[r], b, row_type);
                        const int32_t *sum = block->sums[w];
                        UNROLLED for (int q = 0; q < P; q++) {
                            if (in_groups(type))
                                found[r][w][q] = (-offset - factors[q].zero) * all_integers(sum[0] + sum[1]);
                            else if (row_type == BYTES && offset == 8) found[r][w][q] = all_integers(block->minus_8);
                            else if (row_type == BYTES && offset == 128)
                                found[r][w][q] = all_integers(block->minus_128);
                            else found[r][w][q] = all_integers(offset == 0 ? 0 : -offset * (
                                scales_per_block(type) == 2 ? sum[half] : sum[0] + sum[1]));
                            if (is_in_bytes && is_signed(type))
                                found[r][w][q] -= all_integers(block->upper_sum * 0x8000);
                        }
                    }
                const int count = BLOCK_INPUTS / 2 / scales_per_block(type);
                if (is_in_bytes) {
                    const int32_t *bytes = (const int32_t *)(from[0].words[1] + b * BLOCK_INPUTS);
                    UNROLLED for (int q = 0; q < P; q++)
                        found[0][0][q] = sum_in_bytes(type, levels[q], half * count / 2, count / 2, bytes,
                                                      found[0][0][q]);
                } else if (row_type == BYTES) {
                    signed_pairs some[MAX_QUANTISED_ROWS][MAX_QUANTISED_PANELS];
                    UNROLLED for (int i = half * count / 2; i < (half + 1) * count / 2; i++) {
                        words weights[MAX_QUANTISED_PANELS];
                        UNROLLED for (int q = 0; q < P; q++) weights[q] = bytes_of_line(type, levels[q], i);
                        UNROLLED for (int r = 0; r < R; r++) {
                            int32_t four = ((const int32_t *)(block_of(&from[r], b, row_type) + 1))[i];
                            UNROLLED for (int q = 0; q < P; q++)
                                found[r][0][q] = add_bytes(type, found[r][0][q], &some[r][q], i, weights[q], four);
                        }
                    }
                } else UNROLLED for (int p = half * count; p < (half + 1) * count; p++) {
                    pairs weights[MAX_QUANTISED_PANELS];
                    UNROLLED for (int q = 0; q < P; q++) weights[q] = levels_of(type, levels[q], p);
                    UNROLLED for (int r = 0; r < R; r++)
                        UNROLLED for (int w = 0; w < num_words; w++) {
                            int32_t two;
                            memcpy(&two, from[r].words[w] + b * BLOCK_INPUTS + 2 * p, 4);
                            UNROLLED for (int q = 0; q < P; q++)
                                found[r][w][q] = add_word_pairs(found[r][w][q], weights[q], all_integers(two));
                        }
                }
                UNROLLED for (int r = 0; r < R; r++)
                    UNROLLED for (int q = 0; q < P; q++) {
                        floats total = __builtin_convertvector(found[r][0][q], floats);
                        if (num_words == 2)
                            total = fused(__builtin_convertvector(found[r][1][q], floats), all(0x1p-15f), total);
                        sums[r][q] = fused(total, s[q].scale[half] * block_of(&from[r], b, row_type)->scale,
                                           sums[r][q]);
                    }
            }
            if (has_minimum(type))
                UNROLLED for (int r = 0; r < R; r++)
                    UNROLLED for (int q = 0; q < P; q++)
                        for (int half = 0; half < (type == Q2_K ? 2 : 1); half++) {
                            const RowBlock *block = block_of(&from[r], b, row_type);
                            floats total = all(type == Q2_K ? block->totals[half] : block->total);
                            sums[r][q] = fused(s[q].minimum[half], total, sums[r][q]);
                        }
        }
        for (int r = 0; r < R; r++)
            for (int q = 0; q < P; q++)
                finish(m, t, row + r, (panel + q) * PANEL + v * LANES, sums[r][q] * m->factor);
    }
}

/* Kernels: as many rows at a time as fit into registers. */
typedef void (*PanelKernel)(const Matrix *, const QuantisedPart *, const char *, int64_t, const Target *, int64_t,
                            int64_t);
#define PANEL_KERNEL(TYPE, R, P, ROWS)                                                                                \
    static void TYPE##_##R##x##P##_##ROWS(const Matrix *m, const QuantisedPart *part, const char *x,                  \
                                          int64_t row_bytes, const Target *t, int64_t row, int64_t panel) {           \
        multiply_panels(TYPE, R, P, ROWS, m, part, x, row_bytes, t, row, panel);                                      \
    }
/* min_row: of the first row. Later rows find the panels in the cache. Two of them at once come from memory slowly. */
static const struct { int rows, panels, min_row; } kernel_sizes[3][4] = {
#if LANES == 16
    {{1, 1, 0}, {2, 1, 0}, {4, 2, 0}, {}}, {{1, 1, 0}, {4, 1, 0}, {8, 1, 0}, {8, 2, 8}},
    {{1, 1, 0}, {4, 1, 0}, {8, 1, 0}, {}}};
#define PANEL_KERNELS(TYPE)                                                                                           \
    PANEL_KERNEL(TYPE, 1, 1, FLOAT32) PANEL_KERNEL(TYPE, 2, 1, FLOAT32) PANEL_KERNEL(TYPE, 4, 2, FLOAT32)             \
    PANEL_KERNEL(TYPE, 1, 1, BFLOAT16) PANEL_KERNEL(TYPE, 4, 1, BFLOAT16) PANEL_KERNEL(TYPE, 8, 1, BFLOAT16)          \
    PANEL_KERNEL(TYPE, 1, 1, BYTES) PANEL_KERNEL(TYPE, 4, 1, BYTES) PANEL_KERNEL(TYPE, 8, 1, BYTES)
#define KERNELS_OF(TYPE, LARGEST)                                                                                     \
    {{TYPE##_1x1_FLOAT32, TYPE##_2x1_FLOAT32, TYPE##_4x2_FLOAT32},                                                    \
     {TYPE##_1x1_BFLOAT16, TYPE##_4x1_BFLOAT16, TYPE##_8x1_BFLOAT16, LARGEST},                                        \
     {TYPE##_1x1_BYTES, TYPE##_4x1_BYTES, TYPE##_8x1_BYTES}}
/* For the most frequent types of those that gain by it. Each takes half a second to compile. */
PANEL_KERNEL(Q4_0, 8, 2, BFLOAT16) PANEL_KERNEL(Q4_1, 8, 2, BFLOAT16) PANEL_KERNEL(Q8_0, 8, 2, BFLOAT16)
PANEL_KERNEL(Q4_K, 8, 2, BFLOAT16) PANEL_KERNEL(INT4, 8, 2, BFLOAT16) PANEL_KERNEL(INT8, 8, 2, BFLOAT16)
#define LARGEST_OF(TYPE) TYPE##_8x2_BFLOAT16
#else
    {{1, 1, 0}, {2, 1, 0}, {}, {}}, {{1, 1, 0}, {4, 1, 0}, {}, {}}, {{1, 1, 0}, {4, 1, 0}, {}, {}}};
#define PANEL_KERNELS(TYPE)                                                                                           \
    PANEL_KERNEL(TYPE, 1, 1, FLOAT32) PANEL_KERNEL(TYPE, 2, 1, FLOAT32)                                               \
    PANEL_KERNEL(TYPE, 1, 1, BFLOAT16) PANEL_KERNEL(TYPE, 4, 1, BFLOAT16)                                             \
    PANEL_KERNEL(TYPE, 1, 1, BYTES) PANEL_KERNEL(TYPE, 4, 1, BYTES)
#define KERNELS_OF(TYPE, LARGEST) {{TYPE##_1x1_FLOAT32, TYPE##_2x1_FLOAT32},                                          \
                                   {TYPE##_1x1_BFLOAT16, TYPE##_4x1_BFLOAT16}, {TYPE##_1x1_BYTES, TYPE##_4x1_BYTES}}
#endif
PANEL_KERNELS(Q4_0) PANEL_KERNELS(Q4_1) PANEL_KERNELS(Q5_0) PANEL_KERNELS(Q5_1) PANEL_KERNELS(Q8_0)
PANEL_KERNELS(IQ4_NL) PANEL_KERNELS(Q2_K) PANEL_KERNELS(Q3_K) PANEL_KERNELS(Q4_K) PANEL_KERNELS(Q5_K)
PANEL_KERNELS(Q6_K) PANEL_KERNELS(IQ4_XS) PANEL_KERNELS(INT4) PANEL_KERNELS(INT8)

/* Kernels of each type, for each type of rows, of the kernel_sizes; NULL: none of this size. */
static const PanelKernel panel_kernels[NUM_TYPES][3][4] = {
    KERNELS_OF(Q4_0, LARGEST_OF(Q4_0)), KERNELS_OF(Q4_1, LARGEST_OF(Q4_1)), KERNELS_OF(Q5_0, 0), KERNELS_OF(Q5_1, 0),
    KERNELS_OF(Q8_0, LARGEST_OF(Q8_0)), KERNELS_OF(IQ4_NL, 0), KERNELS_OF(Q2_K, 0), KERNELS_OF(Q3_K, 0),
    KERNELS_OF(Q4_K, LARGEST_OF(Q4_K)), KERNELS_OF(Q5_K, 0), KERNELS_OF(Q6_K, 0), KERNELS_OF(IQ4_XS, 0),
    KERNELS_OF(INT4, LARGEST_OF(INT4)), KERNELS_OF(INT8, LARGEST_OF(INT8))};

/* Multiply all rows with the panels first .. end - 1. Rows of x are prepared, and `stride` entries of their type apart.
*/
static void multiply_quantised(const Matrix *m, const void *x, int64_t stride, int64_t rows, const Target *t,
                               int64_t first, int64_t end) {
    const int64_t row_bytes = stride * bytes_of(m->type), kind = rows_of_matrix(m);
    for (const QuantisedPart *part = m->parts; part < m->parts + m->num_parts; part++) {
        int64_t last = end < part->end_panel ? end : part->end_panel;
        for (int64_t panel = first > part->first_panel ? first : part->first_panel; panel < last; panel += 2) {
            int wide = panel + 2 <= last ? 2 : 1, at;
            for (int64_t row = 0; row < rows; row += kernel_sizes[kind][at].rows) {
                for (at = 3;; at--)                        /* the largest kernel that the rows and panels fill */
                    if (panel_kernels[part->type][kind][at] && kernel_sizes[kind][at].rows <= rows - row
                        && kernel_sizes[kind][at].panels <= wide && kernel_sizes[kind][at].min_row <= row) break;
                const char *from = (const char *)x + row * row_bytes;
                for (int i = 0; i < wide; i += kernel_sizes[kind][at].panels)
                    panel_kernels[part->type][kind][at](m, part, from, row_bytes, t, row, panel + i);
            }
        }
    }
}

/* ---------------------------------------------------------------- packing and decoding */

INLINE uint16_t half_at(const uint8_t *from) {
    uint16_t half;
    memcpy(&half, from, 2);
    return half;
}

/* A block of a file: its levels, as stored in a panel, and its scales and minimum in the form of the panel. */
typedef struct {
    uint8_t levels[BLOCK_INPUTS];
    uint8_t scale[2], minimum[2];     /* half floats. Of K types: the bytes of a panel, two in scale, or one in each */
    uint8_t factors[4];               /* of K types: half floats of scales and minima */
} FileBlock;

/* Of a file, with blocks. */
int64_t quantised_row_bytes(int type, int64_t inputs) {
    static const int64_t of_block[NUM_TYPES] = {18, 20, 22, 24, 34, 18, 84, 110, 144, 176, 210, 136};
    return inputs / (is_k(type) ? BLOCKS_OF_A_FACTOR * BLOCK_INPUTS : BLOCK_INPUTS) * of_block[type];
}

/* Read block b of a row of a file with blocks. */
static FileBlock file_block(int type, const uint8_t *row, int64_t b) {
    FileBlock f = {};
    int upper[BLOCK_INPUTS] = {};
    if (!is_k(type)) {
        row += quantised_row_bytes(type, BLOCK_INPUTS) * b;
        memcpy(f.scale, row, 2);
        row += 2;
        if (has_minimum(type)) memcpy(f.minimum, row, 2), row += 2;
        if (type == Q8_0) {
            memcpy(f.levels, row, BLOCK_INPUTS);
            return f;
        }
        if (level_bits(type) == 5) {
            for (int i = 0; i < BLOCK_INPUTS; i++) upper[i] = row[i / 8] >> i % 8 & 1;
            row += 4;
        }
        for (int i = 0; i < BLOCK_INPUTS; i++)
            f.levels[i] = (uint8_t)((i < 16 ? row[i] & 15 : row[i - 16] >> 4) | upper[i] << 4);
        return f;
    }
    row += quantised_row_bytes(type, BLOCKS_OF_A_FACTOR * BLOCK_INPUTS) * (b / BLOCKS_OF_A_FACTOR);
    int j = (int)(b % BLOCKS_OF_A_FACTOR);
    if (type == IQ4_XS) {
        const uint8_t *low = row + 8 + j * 16;
        int scale = (row[4 + j / 2] >> j % 2 * 4 & 15) | (half_at(row + 2) >> 2 * j & 3) << 4;
        memcpy(f.factors, row, 2);
        f.scale[0] = (uint8_t)(scale - 32);
        for (int i = 0; i < BLOCK_INPUTS; i++) f.levels[i] = i < 16 ? low[i] & 15 : low[i - 16] >> 4;
        return f;
    }
    if (type == Q2_K || type == Q3_K) {
        const uint8_t *low = row + (type == Q2_K ? 16 : 32) + j / 4 * 32, *six = row + 96;
        memcpy(f.factors, row + (type == Q2_K ? 80 : 108), type == Q2_K ? 4 : 2);
        for (int half = 0; half < 2; half++) {
            int k = 2 * j + half;
            int scale = (k < 8 ? six[k % 8] & 15 : six[k % 8] >> 4) | (six[8 + k % 4] >> k / 4 * 2 & 3) << 4;
            f.scale[half] = type == Q2_K ? row[k] : (uint8_t)(scale - 32);
        }
        for (int i = 0; i < BLOCK_INPUTS; i++)
            f.levels[i] = (uint8_t)((low[i] >> j % 4 * 2 & 3) | (type == Q3_K ? (row[i] >> j & 1) << 2 : 0));
        return f;
    }
    if (type == Q6_K) {
        const uint8_t *low = row + j / 4 * 64 + j % 2 * 32, *high = row + 128 + j / 4 * 32;
        f.scale[0] = row[192 + 2 * j], f.scale[1] = row[192 + 2 * j + 1];
        memcpy(f.factors, row + 208, 2);
        for (int i = 0; i < BLOCK_INPUTS; i++)
            f.levels[i] = (uint8_t)((j % 4 / 2 ? low[i] >> 4 : low[i] & 15) | (high[i] >> j % 4 * 2 & 3) << 4);
        return f;
    }
    const uint8_t *scales = row + 4, *low = row + (type == Q5_K ? 48 : 16) + j / 2 * 32;
    memcpy(f.factors, row, 4);
    f.scale[0] = (uint8_t)(j < 4 ? scales[j] & 63 : (scales[j + 4] & 15) | scales[j - 4] >> 6 << 4);
    f.minimum[0] = (uint8_t)(j < 4 ? scales[j + 4] & 63 : scales[j + 4] >> 4 | scales[j] >> 6 << 4);
    for (int i = 0; i < BLOCK_INPUTS; i++)
        f.levels[i] = (uint8_t)((j % 2 ? low[i] >> 4 : low[i] & 15) | (type == Q5_K ? (row[16 + i] >> j & 1) << 4 : 0));
    return f;
}

/* Put a block of output o into a panel, whose levels are zero. */
static void put_block(const QuantisedPart *part, uint8_t *panel, int64_t blocks, int64_t b, int o, const FileBlock *f) {
    int type = (int)part->type;
    uint8_t *scales = panel + scales_at(type, b), *levels = panel + levels_at(type, b) + o * 4;
    if (is_k(type)) {
        uint8_t *factors = panel + factors_at(type, blocks) + b / BLOCKS_OF_A_FACTOR * factor_bytes(part) + o * 2;
        scales[o] = f->scale[0];
        if (scales_per_block(type) == 2) scales[PANEL + o] = f->scale[1];
        else if (has_minimum(type)) scales[PANEL + o] = f->minimum[0];
        memcpy(factors, f->factors, 2);
        if (has_minimum(type)) memcpy(factors + LINE_BYTES / 2, f->factors + 2, 2);
    } else if (!in_groups(type)) {
        memcpy(scales + o * 2, f->scale, 2);
        if (has_minimum(type)) memcpy(scales + LINE_BYTES / 2 + o * 2, f->minimum, 2);
    }
    for (int h = 0; h < 2; h++) {
        uint16_t word[8] = {};
        for (int p = 0; p < BLOCK_INPUTS / 2; p++) {
            unsigned level = f->levels[2 * p + h];
            if (has_bytes(type)) {
                word[p / 4 * 2 + p % 2] |= (uint16_t)(level << p / 2 % 2 * 8);
                continue;
            }
            if (level_bits(type) < 4) {
                word[p / 8] |= (uint16_t)((level & 3) << two_bits_of(p));
                word[2] |= (uint16_t)((level >> 2) << bit_of(p));
                continue;
            }
            word[p / 4] |= (uint16_t)((level & 15) << p % 4 * 4);
            if (level_bits(type) == 5) word[4] |= (uint16_t)((level >> 4) << bit_of(p));
            if (level_bits(type) == 6) word[4 + p / 8] |= (uint16_t)((level >> 4) << two_bits_of(p));
        }
        for (int i = 0; i < level_bits(type); i++) memcpy(levels + i * LINE_BYTES + h * 2, word + i, 2);
    }
}

/* The numbers of one output of a panel. */
static void decode_row(const QuantisedPart *part, const uint8_t *panel, int64_t blocks, int o, void *to, int row_type) {
    int type = (int)part->type, offset = offset_of(type);
    for (int64_t b = 0; b < blocks; b++) {
        const uint8_t *scales = panel + scales_at(type, b), *levels = panel + levels_at(type, b) + o * 4;
        const uint8_t *first = panel + factors_at(type, blocks) + b / blocks_of_a_factor(part) * factor_bytes(part);
        const uint8_t *factors = first + o * 2;
        float scale[2], minimum[2] = {0, 0};
        if (in_groups(type)) {
            const uint8_t *zeros = first + PANEL * bytes_of((int)part->scale_type) + o * zero_bytes(type);
            int16_t zero = *zeros;
            if (type == INT8) memcpy(&zero, zeros, 2);
            offset = zero;
            scale[0] = scale[1] = part->scale_type == HALF ? from_half(half_at(factors))
                                                           : load_one(first, o, (int)part->scale_type);
        } else if (!is_k(type)) {
            scale[0] = scale[1] = from_half(half_at(scales + o * 2));
            if (has_minimum(type)) minimum[0] = minimum[1] = from_half(half_at(scales + LINE_BYTES / 2 + o * 2));
        } else {
            float factor = from_half(half_at(factors));
            for (int half = 0; half < 2; half++) {
                int byte = scales[(scales_per_block(type) == 2 ? half : 0) * PANEL + o];
                scale[half] = factor * (float)(type == Q2_K ? byte & 15 : has_minimum(type) ? byte : (int8_t)byte);
                if (has_minimum(type))
                    minimum[half] = -from_half(half_at(factors + LINE_BYTES / 2))
                                    * (float)(type == Q2_K ? byte >> 4 : scales[PANEL + o]);
            }
        }
        for (int i = 0; i < BLOCK_INPUTS; i++) {
            int p = i / 2;
            const uint8_t *words = levels + i % 2 * 2;
            int level;
            if (has_bytes(type)) {
                level = (int8_t)words[(p / 4 * 2 + p % 2) * LINE_BYTES + p / 2 % 2];
            } else if (level_bits(type) < 4) {
                level = half_at(words + p / 8 * LINE_BYTES) >> two_bits_of(p) & 3;
                if (level_bits(type) == 3) level |= (half_at(words + 2 * LINE_BYTES) >> bit_of(p) & 1) << 2;
            } else {
                level = half_at(words + p / 4 * LINE_BYTES) >> p % 4 * 4 & 15;
                if (level_bits(type) == 5) level |= (half_at(words + 4 * LINE_BYTES) >> bit_of(p) & 1) << 4;
                if (level_bits(type) == 6)
                    level |= (half_at(words + (4 + p / 8) * LINE_BYTES) >> two_bits_of(p) & 3) << 4;
            }
            if (in_table(type)) level = table_of_levels[level];
            int half = i / (BLOCK_INPUTS / 2);
            float number = (float)(level - offset) * scale[half] + minimum[half];
            store_one(to, b * BLOCK_INPUTS + i, number, row_type);
        }
    }
}

/* Pack `count` rows, `row_bytes` bytes each, into the outputs [count] of a part, whose panels are zero. A row is one of
   a file with blocks. With groups, it has a level of each input as a byte, then the scales of all groups, then their
   zero points as int16. */
void pack_quantised_rows(const QuantisedPart *part, int64_t inputs, const uint8_t *rows, int64_t row_bytes,
                         const int64_t *outputs, int64_t count) {
    const int type = (int)part->type;
    const int64_t blocks = inputs / BLOCK_INPUTS, groups = num_factors(part, inputs);
    const int64_t size = bytes_of((int)part->scale_type);
    for (int64_t i = 0; i < count; i++, rows += row_bytes) {
        int64_t output = outputs[i], o = output % PANEL;
        uint8_t *panel = part->panels + (output / PANEL - part->first_panel) * quantised_panel_bytes(part, inputs);
        for (int64_t b = 0; b < blocks; b++) {
            FileBlock f = {};
            if (in_groups(type)) memcpy(f.levels, rows + b * BLOCK_INPUTS, BLOCK_INPUTS);
            else f = file_block(type, rows, b);
            put_block(part, panel, blocks, b, (int)o, &f);
        }
        if (!in_groups(type)) continue;
        uint8_t *factors = panel + factors_at(type, blocks);
        for (int64_t g = 0; g < groups; g++, factors += factor_bytes(part)) {
            memcpy(factors + o * size, rows + inputs + g * size, size);
            memcpy(factors + PANEL * size + o * zero_bytes(type), rows + inputs + groups * size + g * 2, zero_bytes(type));
        }
    }
}

/* Decode the outputs [count] of a matrix to rows of its type, `inputs` entries each. Returns 0, or 1 without decoding
   if the matrix does not have one of these outputs. */
int decode_quantised_rows(const Matrix *m, const int64_t *outputs, int64_t count, void *to) {
    for (int64_t i = 0; i < count; i++)
        if (outputs[i] < 0 || outputs[i] >= m->outputs) return 1;
    for (int64_t i = 0; i < count; i++) {
        const QuantisedPart *part = m->parts;
        while (outputs[i] / PANEL >= part->end_panel) part++;
        const uint8_t *panel = part->panels + (outputs[i] / PANEL - part->first_panel)
                               * quantised_panel_bytes(part, m->inputs);
        decode_row(part, panel, m->inputs / BLOCK_INPUTS, (int)(outputs[i] % PANEL),
                   (char *)to + i * m->inputs * bytes_of(m->type), m->type);
    }
    return 0;
}

/* ---------------------------------------------------------------- quantising */

/* Nearest half float, ties to even; a larger number is infinite. */
INLINE uint16_t to_half(float value) {
    uint32_t bits, size;
    memcpy(&bits, &value, 4);
    size = bits & 0x7fffffff;
    uint32_t sign = bits >> 16 & 0x8000;
    if (size > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (size >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (size < 0x38800000) {                               /* denormal: a multiple of 2^-24 */
        memcpy(&value, &size, 4);
        return (uint16_t)(sign | (uint32_t)nearbyintf(value * 0x1p24f));
    }
    return (uint16_t)(sign | (size - 0x38000000 + 0xfff + (size >> 13 & 1)) >> 13);
}

/* The levels of a block: nearest, ties to even, within the range. Any levels if the scale is not finite. */
INLINE void levels_for(const float *weights, float scale, float lowest, float highest, float *levels) {
    float inverse = scale == 0 ? 0 : 1 / scale;
    for (int i = 0; i < BLOCK_INPUTS; i++) {
        float level = weights[i] * inverse;
        level = level > lowest ? level : lowest;
        level = level < highest ? level : highest;
        levels[i] = (level + 0x1.8p23f) - 0x1.8p23f;
    }
}

/* Quantise a block of weights for `type`, Q8_0 or Q4_0, as a file has it. Levels of 4 bits have the scale, of five, with
   the smallest sum of squared errors: the largest weight becomes level -8, or is rounded to it or to -7. */
static void quantise_block(int type, const float *weights, uint8_t *to) {
    static const float divisors[] = {-8.0f, -7.5f, -7.0f, -8.5f, -9.0f};
    float largest = 0, levels[BLOCK_INPUTS], best_levels[BLOCK_INPUTS] = {};
    for (int i = 0; i < BLOCK_INPUTS; i++)
        if (!(fabsf(weights[i]) <= fabsf(largest)) && largest == largest) largest = weights[i];
    if (type == Q8_0) {
        uint16_t half = to_half(fabsf(largest) / 127.0f);
        levels_for(weights, from_half(half), -127, 127, levels);
        memcpy(to, &half, 2);
        for (int i = 0; i < BLOCK_INPUTS; i++) to[2 + i] = (uint8_t)(int8_t)levels[i];
        return;
    }
    double least = INFINITY;
    uint16_t best = to_half(largest / divisors[0]);
    for (int tried = 0; tried < 5; tried++) {
        uint16_t half = to_half(largest / divisors[tried]);
        float scale = from_half(half);
        double errors[4] = {};
        levels_for(weights, scale, -8, 7, levels);
        for (int i = 0; i < BLOCK_INPUTS; i += 4)
            for (int j = 0; j < 4; j++) {
                double difference = (double)(scale * levels[i + j]) - weights[i + j];
                errors[j] = fma(difference, difference, errors[j]);
            }
        double error = (errors[0] + errors[1]) + (errors[2] + errors[3]);
        if (error < least) {
            least = error, best = half;
            memcpy(best_levels, levels, sizeof levels);
        }
    }
    memcpy(to, &best, 2);
    for (int i = 0; i < BLOCK_INPUTS / 2; i++)
        to[2 + i] = (uint8_t)((int)best_levels[i] + 8 + ((int)best_levels[i + 16] + 8) * 16);
}

/* Quantise `count` rows of weights of a type of vectors.h, `stride` entries apart, to rows of a file of type Q8_0 or
   Q4_0. Weights after the last input are zero. */
void quantise_rows(int type, const void *weights, int weight_type, int64_t stride, int64_t inputs, int64_t count,
                   uint8_t *to) {
    for (int64_t row = 0; row < count; row++)
        for (int64_t first = 0; first < inputs; first += BLOCK_INPUTS) {
            float block[BLOCK_INPUTS] = {};
            for (int64_t i = 0; i < BLOCK_INPUTS && first + i < inputs; i++)
                block[i] = load_one(weights, row * stride + first + i, weight_type);
            quantise_block(type, block, to);
            to += quantised_row_bytes(type, BLOCK_INPUTS);
        }
}
