/* Kernels for products of rows and panels of quantised blocks, see quantised.h. Those of all types take twice as long to
   compile as the rest of the step. So they are in panel_kernels.c, which is compiled for a type when a matrix of it is
   made; a wheel has all. */
#pragma once
#include "quantised.h"

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define UNROLLED                      /* instrumented code would take minutes to compile */
#elif !defined(UNROLLED)              /* -DUNROLLED= compiles in two thirds of the time */
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

/* Levels with a sign + 128, which kernels make up for. */
INLINE words unsigned_levels(int type, words w) { return is_signed(type) ? w ^ 0x80808080 : w; }

/* sums + the products of four bytes without a sign and four with one. */
INLINE integers add_byte_products(integers sums, words positive, words x) {
#if HAS_BYTE_PRODUCTS
    return (integers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)positive, (__m512i)x);
#else
    return sums;
#endif
}

/* The number of lines whose products of bytes, each the sum of two, add up to at most 32,767. */
INLINE int lines_in_words(int type) {
    int most = is_signed(type) ? 1 : level_bits(type) == 6 ? 2 : level_bits(type) == 5 ? 4 : 8;
    return most < 8 / scales_per_block(type) ? most : 8 / scales_per_block(type);
}

/* sums + words, each the sum of two products of bytes. `some` keeps them until there are those of `lines` lines. */
INLINE integers add_words(integers sums, signed_pairs *some, int i, int lines, signed_pairs found) {
    *some = i % lines ? *some + found : found;
    SUM_NOW(*some);
    return i % lines == lines - 1 ? add_word_pairs(sums, (pairs)*some, all_integers(0x10001)) : sums;
}

/* sums + the products of line i of levels and four bytes of x. */
INLINE integers add_bytes(int type, integers sums, signed_pairs *some, int i, words w, int32_t x) {
#if HAS_BYTE_PRODUCTS
    return add_byte_products(sums, unsigned_levels(type, w), (words)all_integers(x));
#elif LANES == 8 || defined(__AVX512BW__)
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
    return add_words(sums, some, i, lines_in_words(type), found);
#else
    uint32_t upper = (uint32_t)(x >> 8 & 0xff00ff), lower = (uint32_t)(x & 0xff00ff);
    integers odd = (integers)((signed_pairs)(all_integers((int32_t)(upper << 8))) >> 8);
    integers even = (integers)((signed_pairs)(all_integers((int32_t)(lower << 8))) >> 8);
    sums = add_word_pairs(sums, (pairs)((signed_pairs)(w << 8) >> 8), even);
    return add_word_pairs(sums, (pairs)((signed_pairs)w >> 8), odd);
#endif
}

#if LANES == 8
/* The lower bytes, or the upper ones, of four words of x, which line i of levels is multiplied with. */
INLINE __m256i bytes_of_words(const int16_t *x, int i, int are_upper) {
    __m256i eight = _mm256_broadcastsi128_si256(_mm_loadu_si128((const void *)(x + i / 2 * 8)));
    return _mm256_shuffle_epi8(eight, _mm256_set1_epi32((i % 2 ? 0x0e060c04 : 0x0a020800) + are_upper * 0x01010101));
}
#endif

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

INLINE void prefetch_ahead(const uint8_t *line, int64_t ahead, int is_single) {
    prefetch_soon(line + ahead);
    if (is_single) prefetch(line + NEAREST_AHEAD);
}

/* Multiply R rows with P adjacent panels, which share the loads of x. */
INLINE void multiply_panels(const int type, const int R, const int P, const int row_type, const Matrix *m,
                            const QuantisedPart *part, const char *x, int64_t row_bytes, const Target *t, int64_t row,
                            int64_t panel) {
    const int num_words = words_per_number(row_type);
    const int64_t blocks = m->inputs / BLOCK_INPUTS, panel_bytes = bytes_of_panel(part, m->inputs);
    const uint8_t *first = part->panels + (panel - part->first_panel) * panel_bytes;
    const int64_t shared = in_groups(type) ? part->group_blocks : BLOCKS_OF_A_FACTOR;
    /* Words of x are 256 upper + lower. Products of their bytes, and of second words, have the sums of words. Bytes of
       levels take half the instructions to unpack, and second words half the products. For more rows of bfloat16 than
       one, adding up two sums takes longer. */
    const int is_in_bytes = HAS_BYTE_PRODUCTS && (row_type == FLOAT32 || (row_type == BFLOAT16 && R == 1));
    /* With AVX2, only for a single row of float32: for more, the bytes would have to be at hand. */
    const int takes_bytes = LANES == 8 && row_type == FLOAT32 && R == 1 && !is_signed(type);
    const int V = R == 1 && PARTS > 1 ? 2 : 1, Q = P * V;          /* vectors of a panel, and all; they share x, too */
    const int offset = offset_of(type) + (row_type == BYTES && HAS_BYTE_PRODUCTS && is_signed(type) ? 128 : 0);
    PreparedRow from[MAX_QUANTISED_ROWS];
    for (int r = 0; r < R; r++) from[r] = prepared_row(x + r * row_bytes, m->inputs, row_type);
    for (int v = 0; v < PARTS; v += V) {
        floats sums[MAX_QUANTISED_ROWS][MAX_QUANTISED_PANELS];
        UNROLLED for (int r = 0; r < R; r++)
            UNROLLED for (int q = 0; q < Q; q++) sums[r][q] = all(0);
        Factors factors[MAX_QUANTISED_PANELS] = {};
        int64_t next_factors = factors_at(type, blocks), next_block = 0;       /* next_block has other factors */
        for (int64_t b = 0; b < blocks; b++) {
            if ((is_k(type) || in_groups(type)) && b == next_block) {
                UNROLLED for (int q = 0; q < Q; q++) {
                    const uint8_t *here = first + q / V * panel_bytes + next_factors;
                    factors[q] = factors_of(type, part, here, (v + q % V) * LANES);
                    /* Those of the next panels are not in the stream of levels: each panel would wait for them. */
                    if (v + q % V == 0) prefetch_soon(here + P * panel_bytes);
                }
                next_factors += factor_bytes(part), next_block += shared;
            }
            int64_t ahead = PREFETCHED_AHEAD / P;
            if (P > 1 && levels_at(type, b) + ahead >= panel_bytes) ahead += (P - 1) * panel_bytes;
            const uint8_t *levels[MAX_QUANTISED_PANELS];
            Scales s[MAX_QUANTISED_PANELS];
            UNROLLED for (int q = 0; q < Q; q++) {
                const uint8_t *start = first + q / V * panel_bytes;
                levels[q] = start + levels_at(type, b);
                if (v + q % V == 0) {
                    UNROLLED for (int i = 0; i < level_bits(type); i++)
                        prefetch_ahead(levels[q] + i * LINE_BYTES, ahead, R == 1);
                    if (line_bytes(type) && b % blocks_per_line(type) == 0)
                        prefetch_ahead(levels[q] - LINE_BYTES, ahead, R == 1);
                }
                levels[q] += (v + q % V) * LANES * 4;
                const int lane_bytes = is_k(type) ? 1 : 2;
                s[q] = scales_of(type, start + scales_at(type, b) + (v + q % V) * LANES * lane_bytes, factors[q]);
            }
            UNROLLED for (int half = 0; half < scales_per_block(type); half++) {
                integers found[MAX_QUANTISED_ROWS][2][MAX_QUANTISED_PANELS];
                UNROLLED for (int r = 0; r < R; r++)
                    UNROLLED for (int w = 0; w < num_words; w++) {
                        const RowBlock *block = block_of(&from[r], b, row_type);
                        const int32_t first = w ? block->second_sums[0] : block->sums[0];
                        const int32_t second = w ? block->second_sums[1] : block->sums[1];
                        UNROLLED for (int q = 0; q < Q; q++) {
                            if (in_groups(type))
                                found[r][w][q] = (-offset - factors[q].zero) * all_integers(first + second);
                            else if (row_type == BYTES && offset == 8) found[r][w][q] = all_integers(block->minus_8);
                            else if (row_type == BYTES && offset == 128)
                                found[r][w][q] = all_integers(block->minus_128);
                            else found[r][w][q] = all_integers(offset == 0 ? 0 : -offset * (
                                scales_per_block(type) == 1 ? first + second : half ? second : first));
                            if (is_in_bytes && is_signed(type) && w == 0)
                                found[r][w][q] -= all_integers(block->upper_sum * 0x8000);
                        }
                    }
                const int count = BLOCK_INPUTS / 2 / scales_per_block(type);
                if (is_in_bytes) {
                    integers upper[MAX_QUANTISED_ROWS][MAX_QUANTISED_PANELS] = {};
                    UNROLLED for (int i = half * count / 2; i < (half + 1) * count / 2; i++) {
                        words weights[MAX_QUANTISED_PANELS];
                        UNROLLED for (int q = 0; q < Q; q++) weights[q] = bytes_of_line(type, levels[q], i);
                        UNROLLED for (int r = 0; r < R; r++) {
                            const int32_t *x0 = (const int32_t *)(from[r].words[num_words == 1] + b * BLOCK_INPUTS);
                            words low = (words)all_integers(x0[2 * i]), high = (words)all_integers(x0[2 * i + 1]);
                            UNROLLED for (int q = 0; q < Q; q++) {
                                found[r][0][q] = add_byte_products(found[r][0][q], low, weights[q]);
                                upper[r][q] = add_byte_products(upper[r][q], unsigned_levels(type, weights[q]), high);
                            }
                            if (num_words == 1) continue;
                            const int32_t *x1 = (const int32_t *)(from[r].words[1] + b * BLOCK_INPUTS / 2);
                            words last = (words)all_integers(x1[i]);
                            UNROLLED for (int q = 0; q < Q; q++)
                                found[r][1][q] = add_byte_products(found[r][1][q], last, weights[q]);
                        }
                    }
                    UNROLLED for (int r = 0; r < R; r++)
                        UNROLLED for (int q = 0; q < Q; q++) found[r][0][q] += upper[r][q] << 8;
                } else if (takes_bytes) {
#if LANES == 8
                    const int16_t *x0 = from[0].words[0] + b * BLOCK_INPUTS, *x1 = from[0].words[1] + b * BLOCK_INPUTS;
                    const int lines = lines_in_words(type), unsigned_lines = lines > 1 ? lines / 2 : 1;
                    signed_pairs some[3][MAX_QUANTISED_PANELS];
                    integers upper[MAX_QUANTISED_PANELS] = {};
                    UNROLLED for (int i = half * count / 2; i < (half + 1) * count / 2; i++) {
                        __m256i low = bytes_of_words(x0, i, 0), high = bytes_of_words(x0, i, 1);
                        __m256i last = bytes_of_words(x1, i, 0);
                        UNROLLED for (int q = 0; q < Q; q++) {
                            __m256i w = (__m256i)bytes_of_line(type, levels[q], i);
                            found[0][0][q] = add_words(found[0][0][q], &some[0][q], i, unsigned_lines,
                                                       (signed_pairs)_mm256_maddubs_epi16(low, w));
                            upper[q] = add_words(upper[q], &some[1][q], i, lines,
                                                 (signed_pairs)_mm256_maddubs_epi16(w, high));
                            found[0][1][q] = add_words(found[0][1][q], &some[2][q], i, unsigned_lines,
                                                       (signed_pairs)_mm256_maddubs_epi16(last, w));
                        }
                    }
                    UNROLLED for (int q = 0; q < Q; q++) found[0][0][q] += upper[q] << 8;
#endif
                } else if (row_type == BYTES) {
                    signed_pairs some[MAX_QUANTISED_ROWS][MAX_QUANTISED_PANELS];
                    UNROLLED for (int i = half * count / 2; i < (half + 1) * count / 2; i++) {
                        words weights[MAX_QUANTISED_PANELS];
                        UNROLLED for (int q = 0; q < Q; q++) weights[q] = bytes_of_line(type, levels[q], i);
                        UNROLLED for (int r = 0; r < R; r++) {
                            int32_t four = ((const int32_t *)(block_of(&from[r], b, row_type) + 1))[i];
                            UNROLLED for (int q = 0; q < Q; q++)
                                found[r][0][q] = add_bytes(type, found[r][0][q], &some[r][q], i, weights[q], four);
                        }
                    }
                } else UNROLLED for (int p = half * count; p < (half + 1) * count; p++) {
                    pairs weights[MAX_QUANTISED_PANELS];
                    UNROLLED for (int q = 0; q < Q; q++) weights[q] = levels_of(type, levels[q], p);
                    UNROLLED for (int r = 0; r < R; r++)
                        UNROLLED for (int w = 0; w < num_words; w++) {
                            int32_t two;
                            memcpy(&two, from[r].words[w] + b * BLOCK_INPUTS + 2 * p, 4);
                            UNROLLED for (int q = 0; q < Q; q++)
                                found[r][w][q] = add_word_pairs(found[r][w][q], weights[q], all_integers(two));
                        }
                }
                UNROLLED for (int r = 0; r < R; r++)
                    UNROLLED for (int q = 0; q < Q; q++) {
                        floats total = __builtin_convertvector(found[r][0][q], floats);
                        if (num_words == 2)
                            total = fused(__builtin_convertvector(found[r][1][q], floats), all(0x1p-8f), total);
                        sums[r][q] = fused(total, s[q].scale[half] * block_of(&from[r], b, row_type)->scale,
                                           sums[r][q]);
                    }
            }
            if (has_minimum(type))
                UNROLLED for (int r = 0; r < R; r++)
                    UNROLLED for (int q = 0; q < Q; q++)
                        for (int half = 0; half < (type == Q2_K ? 2 : 1); half++) {
                            const RowBlock *block = block_of(&from[r], b, row_type);
                            floats total = all(type == Q2_K ? block->totals[half] : block->total);
                            sums[r][q] = fused(s[q].minimum[half], total, sums[r][q]);
                        }
        }
        for (int r = 0; r < R; r++)
            for (int q = 0; q < Q; q++)
                finish(m, t, row + r, (panel + q / V) * PANEL + (v + q % V) * LANES, sums[r][q] * m->factor);
    }
}

/* The kernels of a type, of the kernel_sizes, and their table. NULL: none of this size. */
#define PANEL_KERNEL(TYPE, R, P, ROWS)                                                                                \
    static void TYPE##_##R##x##P##_##ROWS(const Matrix *m, const QuantisedPart *part, const char *x,                  \
                                          int64_t row_bytes, const Target *t, int64_t row, int64_t panel) {           \
        multiply_panels(TYPE, R, P, ROWS, m, part, x, row_bytes, t, row, panel);                                      \
    }
#if LANES == 16
/* The largest ones are for the most frequent types of those that gain by it. */
#define HAS_LARGEST(TYPE) (TYPE == Q4_0 || TYPE == Q4_1 || TYPE == Q8_0 || TYPE == Q4_K || TYPE == INT4 || TYPE == INT8)
#define KERNELS_OF(TYPE)                                                                                              \
    PANEL_KERNEL(TYPE, 1, 1, FLOAT32) PANEL_KERNEL(TYPE, 2, 1, FLOAT32) PANEL_KERNEL(TYPE, 4, 2, FLOAT32)             \
    PANEL_KERNEL(TYPE, 1, 1, BFLOAT16) PANEL_KERNEL(TYPE, 4, 1, BFLOAT16) PANEL_KERNEL(TYPE, 8, 1, BFLOAT16)          \
    PANEL_KERNEL(TYPE, 8, 2, BFLOAT16)                                                                                \
    PANEL_KERNEL(TYPE, 1, 1, BYTES) PANEL_KERNEL(TYPE, 4, 1, BYTES) PANEL_KERNEL(TYPE, 8, 1, BYTES)                   \
    static const PanelKernels TYPE##_kernels = {{                                                                     \
        {TYPE##_1x1_FLOAT32, TYPE##_2x1_FLOAT32, TYPE##_4x2_FLOAT32},                                                 \
        {TYPE##_1x1_BFLOAT16, TYPE##_4x1_BFLOAT16, TYPE##_8x1_BFLOAT16, HAS_LARGEST(TYPE) ? TYPE##_8x2_BFLOAT16 : 0}, \
        {TYPE##_1x1_BYTES, TYPE##_4x1_BYTES, TYPE##_8x1_BYTES}}};
#else
#define KERNELS_OF(TYPE)                                                                                              \
    PANEL_KERNEL(TYPE, 1, 1, FLOAT32) PANEL_KERNEL(TYPE, 4, 1, FLOAT32)                                               \
    PANEL_KERNEL(TYPE, 1, 1, BFLOAT16) PANEL_KERNEL(TYPE, 4, 1, BFLOAT16)                                             \
    PANEL_KERNEL(TYPE, 1, 1, BYTES) PANEL_KERNEL(TYPE, 4, 1, BYTES)                                                   \
    static const PanelKernels TYPE##_kernels = {{{TYPE##_1x1_FLOAT32, TYPE##_4x1_FLOAT32},                            \
                                                 {TYPE##_1x1_BFLOAT16, TYPE##_4x1_BFLOAT16},                          \
                                                 {TYPE##_1x1_BYTES, TYPE##_4x1_BYTES}}};
#endif

