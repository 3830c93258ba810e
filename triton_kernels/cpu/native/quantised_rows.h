/* Rows of a GGUF file, and rows of numbers, to panels of quantised blocks and back; see quantised.h. */
#pragma once
#include "quantised.h"

int64_t quantised_panel_bytes(const QuantisedPart *part, int64_t inputs) { return bytes_of_panel(part, inputs); }

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
        uint8_t *panel = part->panels + (output / PANEL - part->first_panel) * bytes_of_panel(part, inputs);
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
                               * bytes_of_panel(part, m->inputs);
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
