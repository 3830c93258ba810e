/* Products with packed and quantised matrices and attention over pages, against sums in float64. Prints the lanes of a
   vector, how many numbers were compared, how many of them are wrong, and a digest of the quantised products. */
#include "step.c"
#include "panel_kernels.c"
#include <stdio.h>

enum { BLOCK_TOKENS = 16, NUM_BLOCKS = 8, KEYS = BLOCK_TOKENS * NUM_BLOCKS };
static uint32_t seed = 1;
static int64_t num_compared, num_wrong;
static uint32_t bits_of_quantised = 1;
#define GROUP 128                     /* inputs */

static void fill(void *row, int64_t count, int type) {
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525 + 1013904223;
        store_one(row, i, (float)(seed >> 8) / (1 << 23) - 1, type);
    }
}

static void compare(double expected, double found, double tolerance) {
    num_compared++;
    num_wrong += !(fabs(expected - found) < tolerance);
}

static void compare_product(int64_t inputs, int64_t outputs, int64_t rows, int type) {
    int64_t padded = (inputs + INPUTS_ALIGNED - 1) / INPUTS_ALIGNED * INPUTS_ALIGNED;
    Matrix m = {padded, outputs, 0, 0, type};
    m.panels = aligned_alloc(64, (size_t)(num_panels(&m) * panel_bytes(&m)));
    char *weight = malloc((size_t)(outputs * inputs * 4)), *x = calloc((size_t)(rows * padded), 4);
    float *y = malloc((size_t)(rows * outputs) * sizeof(float));
    fill(weight, outputs * inputs, type);
    for (int64_t row = 0; row < rows; row++) fill(x + row * padded * bytes_of(type), inputs, type);
    pack_matrix(&m, weight, inputs, inputs);
    Target target = {y, outputs, FLOAT32, 0};
    for (int64_t panel = 0; panel < num_panels(&m); panel += MAX_PANELS_PER_PIECE) {
        int64_t end = panel + MAX_PANELS_PER_PIECE;
        multiply(&m, x, padded, rows, &target, panel, end < num_panels(&m) ? end : num_panels(&m));
    }
    for (int64_t row = 0; row < rows; row++)
        for (int64_t output = 0; output < outputs; output++) {
            double sum = 0;
            for (int64_t i = 0; i < inputs; i++)
                sum += (double)load_one(x, row * padded + i, type) * load_one(weight, output * inputs + i, type);
            compare(sum, y[row * outputs + output], 1e-6 * (double)inputs + 1e-5 * fabs(sum));
        }
    free((void *)m.panels);
    free(weight);
    free(x);
    free(y);
}

/* Random blocks, with small scales. Decoded numbers are compared with GGUF's in test_quantised_products.py. */
static void compare_quantised(int type, int64_t inputs, int64_t outputs, int64_t rows, int row_type, int in_bytes) {
    int64_t groups = inputs / GROUP, panels = (outputs + PANEL - 1) / PANEL, stride = inputs * 3;
    int64_t file_bytes = in_groups(type) ? inputs + groups * 4 : quantised_row_bytes(type, inputs);
    int64_t block_bytes = in_groups(type) ? file_bytes : quantised_row_bytes(type, is_k(type) ? 8 * BLOCK_INPUTS
                                                                                             : BLOCK_INPUTS);
    uint8_t *file = malloc((size_t)(outputs * file_bytes));
    seed = (uint32_t)type;
    for (int64_t i = 0; i < outputs * file_bytes; i++) file[i] = (uint8_t)((seed = seed * 1664525 + 1013904223) >> 24);
    for (int64_t b = 0; b < outputs * file_bytes; b += block_bytes) {          /* half floats from 2^-13 to 2^-9 */
        uint8_t *scale = file + b + (type == Q6_K ? 208 : type == Q3_K ? 108 : type == Q2_K ? 80 : 0);
        if (in_groups(type)) {
            for (int64_t i = 0; i < inputs && type == INT4; i++) file[b + i] &= 15;
            for (int64_t g = 0; g < groups; g++) {
                scale = file + b + inputs + 2 * g;
                scale[1] = (scale[1] & 15) | 8;
                scale[2 * groups] = 9, scale[2 * groups + 1] = 0;          /* zero point */
            }
            continue;
        }
        scale[1] = (scale[1] & 15) | 8;
        if (has_minimum(type)) scale[3] = (scale[3] & 15) | 8;
    }
    QuantisedPart part = {0, panels, type, GROUP / BLOCK_INPUTS, HALF, NULL};
    size_t num_bytes = (size_t)(panels * quantised_panel_bytes(&part, inputs));
    part.panels = memset(aligned_alloc(64, num_bytes), 0, num_bytes);
    Matrix m = {inputs, outputs, 0, 0, row_type, 1.0f, &part, 1, 0, in_bytes};
    int64_t every[64];
    for (int64_t i = 0; i < outputs; i++) every[i] = i;
    pack_quantised_rows(&part, inputs, file, file_bytes, every, outputs);
    char *x = malloc((size_t)(rows * inputs * 4)), *prepared = malloc((size_t)(rows * stride * 4));
    char *weight = malloc((size_t)(outputs * inputs * 4));
    float *y = malloc((size_t)(rows * outputs) * sizeof(float));
    m.type = FLOAT32;
    decode_quantised_rows(&m, every, outputs, weight);
    m.type = row_type;
    fill(x, rows * inputs, row_type);
    for (int64_t row = 0; row < rows; row++)
        prepare_row(x + row * inputs * bytes_of(row_type), prepared + row * stride * bytes_of(row_type), inputs,
                    in_bytes, row_type);
    Target target = {y, outputs, FLOAT32, 0};
    multiply(&m, prepared, stride, rows, &target, 0, panels);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t output = 0; output < outputs; output++) {
            double sum = 0, size = 0;
            for (int64_t i = 0; i < inputs; i++) {
                double each = load_one(x, row * inputs + i, row_type) * load_one(weight, output * inputs + i, FLOAT32);
                sum += each, size += each * each;
            }
            uint32_t bits;
            memcpy(&bits, y + row * outputs + output, 4);
            bits_of_quantised = bits_of_quantised * 1664525 + bits;
            compare(sum, y[row * outputs + output], (in_bytes ? 2e-2 : row_type == FLOAT32 ? 1e-5 : 1e-4) * sqrt(size));
        }
    free(part.panels);
    free(file);
    free(x);
    free(prepared);
    free(weight);
    free(y);
}

/* Entry of a page of numbers of this type. */
static double entry(const char *page, int64_t index, int type) {
    if (type != FP8) return load_one(page, index, type);
    return widen_fp8((octets){} + ((const uint8_t *)page)[index])[0];
}

static void compare_attention(int64_t size, int rows, int type, int cached) {
    static char pool[NUM_BLOCKS * 2 * BLOCK_TOKENS * MAX_HEAD_SIZE * 4] __attribute__((aligned(64)));
    static char queries[MAX_QUERY_ROWS * MAX_HEAD_SIZE * 4] __attribute__((aligned(64)));
    static Partial found;
    static const int32_t blocks[NUM_BLOCKS] = {3, 1, 0, 2, 5, 4, 7, 6};
    int query_type = type_of_queries(type);
    int64_t position[MAX_QUERY_ROWS];
    Cache c = {pool, 1, 1, BLOCK_TOKENS, size, rows, cached};
    Scores how = {.scale = cached == FP8 ? 0.003f : 0.3f};
    double larger_number = cached == FP8 ? 100 : 1;
    Task task = {0, 0, blocks, queries, position, 0, rows, 0, INT64_MAX, pool};
    fill(pool, NUM_BLOCKS * 2 * BLOCK_TOKENS * size, cached == FP8 ? FLOAT32 : cached);
    if (cached == FP8)
        narrow_row_to_fp8(pool, (uint8_t *)pool, NUM_BLOCKS * 2 * BLOCK_TOKENS * size, 0.01f, FLOAT32);
    fill(queries, rows * size, query_type);
    for (int row = 0; row < rows; row++) position[row] = KEYS - 40 + row;
    if (type == FLOAT32) attend(&c, &how, &task, &found, FLOAT32);
    else attend(&c, &how, &task, &found, BFLOAT16);
    for (int row = 0; row < rows; row++) {
        double weight[KEYS], total = 0;
        for (int64_t key = 0; key <= position[row]; key++) {
            const char *page = page_of(&c, blocks[key / BLOCK_TOKENS], 0, 0, 0);
            double score = 0;
            for (int64_t i = 0; i < size; i++)
                score += (double)load_one(queries, row * size + i, query_type)
                         * entry(page, key % BLOCK_TOKENS * size + i, cached);
            total += weight[key] = exp(score * how.scale);
        }
        for (int64_t i = 0; i < size; i++) {
            double sum = 0;
            for (int64_t key = 0; key <= position[row]; key++)
                sum += weight[key] * entry(page_of(&c, blocks[key / BLOCK_TOKENS], 0, 1, 0),
                                           key % BLOCK_TOKENS * size + i, cached);
            compare(sum / total, found.sums[row][i] / found.total[row], 1e-4 * larger_number);
        }
    }
}

int main(void) {
    for (int type = 0; type < NUM_TYPES; type++) use_panel_kernels(type, panel_kernels_of(type));
    static const int64_t shapes[][2] = {{32, 16}, {64, 48}, {576, 100}, {1100, 40}, {33, 17}};
    for (int type = FLOAT32; type <= BFLOAT16; type++) {
        for (int shape = 0; shape < 5; shape++)
            for (int64_t rows = 1; rows < 20; rows++) compare_product(shapes[shape][0], shapes[shape][1], rows, type);
        for (int64_t size = 16; size <= 80; size += 16)
            for (int rows = 1; rows <= MAX_QUERY_ROWS; rows += 3) {
                compare_attention(size, rows, type, type);
                compare_attention(size, rows, type, FP8);
            }
        for (int quantised = 0; quantised < NUM_TYPES; quantised++)
            for (int in_bytes = 0; in_bytes <= 1; in_bytes++) compare_quantised(quantised, 512, 21, 7, type, in_bytes);
    }
    printf("%d lanes, %lld numbers, %lld wrong, bits of quantised products %08x\n", LANES, (long long)num_compared,
           (long long)num_wrong, bits_of_quantised);
    return num_wrong != 0;
}
