/* Attention of many rows in blocks (`attend_in_tiles`) against attention row by row (`attend`): the results differ only
   by the rounding of weights to bfloat16. The bits of each row are those of the row alone, of a cache with smaller
   pages, and of a cache in FP8; so are those of a product. Prints the unit that computes the blocks, and the numbers of wrong results and of
   wrong bits. */
#include "step.c"
#include <stdio.h>
#include <stdlib.h>

#if defined(HAS_ATTENTION_TILES)
enum { BLOCKS = 12, KEY_HEADS = 2, LAYERS = 2 };
static uint32_t seed = 1;
static int64_t wrong_bits;
static uint8_t narrow_pool[BLOCKS * LAYERS * 2 * KEY_HEADS * 128 * 256] __attribute__((aligned(64)));

static uint16_t random_bfloat16(void) {
    seed = seed * 1664525 + 1013904223;
    return narrow(all((float)(seed >> 8) / (1 << 23) - 1))[0];
}

/* Compare the results of a task with those of each row alone, in a copy of the cache with pages of 16 tokens. */
static void compare_bits(const Cache *c, const Scores *how, const Task *task, const Partial *expected) {
    static uint16_t pool[BLOCKS * 256 / 16 * 2 * 256 * 16] __attribute__((aligned(64)));
    static Partial alone;
    int32_t blocks[BLOCKS * 256 / 16];
    int64_t size = c->head_size, last = task->position[task->rows - 1];
    Cache small = {(char *)pool, 1, 1, 16, size, c->query_heads / c->kv_heads, BFLOAT16, 1};
    memset(pool, 0xff, sizeof pool);
    for (int i = 0; i <= last / 16; i++) blocks[i] = (int32_t)(last / 16) - i;
    for (int64_t key = 0; key <= last; key++)
        for (int is_value = 0; is_value < 2; is_value++)
            memcpy((char *)page_of(&small, blocks[key / 16], 0, is_value, 0) + key % 16 * size * 2,
                   entry_of(c, task, key, is_value), (size_t)size * 2);
    for (int row = 0; row < task->rows; row++) {
        Task one = *task;
        one.layer = one.head = 0, one.blocks = blocks, one.rows = 1;
        one.queries += row * size * 2, one.position += row, one.slopes += row;
        attend_in_tiles(&small, how, &one, &alone);
        wrong_bits += alone.maximum[0] != expected->maximum[row] || alone.total[0] != expected->total[row]
                      || memcmp(alone.sums[0], expected->sums[row], (size_t)size * 4);
    }
}

/* Compare the results of a task with those over the same numbers in FP8. */
static void compare_fp8(const Cache *c, const Scores *how, const Task *task, const Partial *expected) {
    static Partial found;
    Cache narrow = *c;
    narrow.pool = (char *)narrow_pool, narrow.type = FP8;
    attend_in_tiles(&narrow, how, task, &found);
    for (int row = 0; row < task->rows; row++)
        wrong_bits += found.maximum[row] != expected->maximum[row] || found.total[row] != expected->total[row]
                      || memcmp(found.sums[row], expected->sums[row], (size_t)c->head_size * 4);
}

static int64_t wrong_numbers(int64_t size, int64_t block, int rows, int group, int64_t start, const Scores *how) {
    static uint16_t pool[BLOCKS * LAYERS * 2 * KEY_HEADS * 128 * 256] __attribute__((aligned(64)));
    static uint8_t codes[sizeof narrow_pool];
    static uint16_t numbers[sizeof pool / 2], queries[MAX_QUERY_ROWS * MAX_HEAD_SIZE] __attribute__((aligned(64)));
    static Partial expected, found;
    Cache c = {(char *)pool, LAYERS, KEY_HEADS, block, size, KEY_HEADS * group, BFLOAT16, 1};
    int32_t blocks[BLOCKS];
    float slopes[MAX_QUERY_ROWS];
    int64_t position[MAX_QUERY_ROWS], wrong = 0, last = start + (rows - 1) / group;
    if (!numbers[0])
        for (size_t i = 0; i < sizeof pool / 2; i++) {
            seed = seed * 1664525 + 1013904223;
            octets code = narrow_to_fp8(all((float)(seed >> 8) / (1 << 23) - 1));
            codes[i] = code[0], numbers[i] = narrow(widen_fp8(code))[0];
        }
    memcpy(narrow_pool, codes, (size_t)(BLOCKS * LAYERS * 2 * KEY_HEADS * block * size));
    memcpy(pool, numbers, (size_t)(BLOCKS * LAYERS * 2 * KEY_HEADS * block * size * 2));
    for (int i = 0; i < rows * size; i++) queries[i] = random_bfloat16();
    for (int i = 0; i < BLOCKS; i++) blocks[i] = i * 5 % BLOCKS;
    for (int row = 0; row < rows; row++) position[row] = start + row / group;
    for (int row = 0; row < rows; row++) slopes[row] = 0.25f * (float)(row % group - 1);
    char *keys = (char *)page_of(&c, blocks[last / block], 1, 0, 1);     /* after the last token: not written yet */
    char *values = (char *)page_of(&c, blocks[last / block], 1, 1, 1);
    int64_t written = (last % block + 1) * size * 2;
    memset(keys + written, 0xff, block * size * 2 - written);
    memset(values + written, 0xff, block * size * 2 - written);
    memset((char *)narrow_pool + (keys - (char *)pool + written) / 2, 0xff, (block * size * 2 - written) / 2);
    memset((char *)narrow_pool + (values - (char *)pool + written) / 2, 0xff, (block * size * 2 - written) / 2);
    Task task = {1, 1, blocks, (char *)queries, position, slopes, rows, 0, INT64_MAX, (char *)pool};
    attend(&c, how, &task, &expected, BFLOAT16);
    memset(&found, 0xff, sizeof found);
    attend_in_tiles(&c, how, &task, &found);
    for (int row = 0; row < rows; row++) {
        float scale = expected.total[row], other = found.total[row];
        wrong += !(fabsf(expected.maximum[row] - found.maximum[row]) < 1e-3f) || !(fabsf(scale / other - 1) < 1e-3f);
        for (int64_t i = 0; i < size; i++)
            wrong += !(fabsf(expected.sums[row][i] / scale - found.sums[row][i] / other) < 4e-3f);
    }
    compare_bits(&c, how, &task, &found);
    compare_fp8(&c, how, &task, &found);
    return wrong;
}

/* Compare products of several rows with those of each row alone. */
static void compare_products(int64_t inputs, int64_t outputs) {
    static uint16_t weight[100 * 100], x[70 * 128];
    static float together[70 * 100], alone[100];
    Matrix m = {(inputs + 31) / 32 * 32, outputs, .type = BFLOAT16, .is_uniform = 1};
    m.panels = aligned_alloc(64, (size_t)(num_panels(&m) * panel_bytes(&m)));
    for (int i = 0; i < 100 * 100; i++) weight[i] = random_bfloat16();
    memset(x, 0, sizeof x);
    for (int row = 0; row < 70; row++)
        for (int i = 0; i < inputs; i++) x[row * m.inputs + i] = random_bfloat16();
    pack_matrix(&m, weight, inputs, inputs);
    for (int rows = 1; rows <= 70; rows += rows % 3 + 1) {
        Target target = {together, outputs, FLOAT32, 0}, one = {alone, outputs, FLOAT32, 0};
        multiply(&m, x, m.inputs, rows, &target, 0, num_panels(&m));
        for (int row = 0; row < rows; row++) {
            multiply(&m, x + row * m.inputs, m.inputs, 1, &one, 0, 1);
            if (num_panels(&m) > 1) multiply(&m, x + row * m.inputs, m.inputs, 1, &one, 1, num_panels(&m));
            wrong_bits += memcmp(alone, together + row * outputs, (size_t)outputs * 4) != 0;
        }
    }
    free((void *)m.panels);
}

/* The argument: one of how many cases to run. */
int main(int count, char **arguments) {
    int one_of = count > 1 ? atoi(arguments[1]) : 1, number = 0;
    compare_products(32, 16);
    compare_products(100, 33);
    compare_products(70, 100);
    const int64_t sizes[] = {32, 64, 96, 128, 256}, sizes_of_blocks[] = {32, 64, 128};
    const float some = 0;                             /* not read: Task has the slope of each row */
    const Scores kinds[] = {{0.3f, 0, 0, 0}, {0.2f, 1.5f, 0, 0}, {0.3f, 0, 50, 0}, {0.3f, 0, 50, 20}, {2.0f, 0, 1, 3},
                            {0.3f, 0, 0, 0, &some}, {0.2f, 1.5f, 50, 20, &some}, {0.3f, 0, 0, 0, &some, 0.25f}};
    int64_t wrong = 0;
    for (int k = 0; k < 15; k++)
        for (int rows = 1; rows <= MAX_QUERY_ROWS; rows += rows % 5 + 1)
            for (int s = 0; s < 8; s++) {
                if (number++ % one_of) continue;
                int64_t block = sizes_of_blocks[k % 3], start = (rows * 37 + k * 11 + s) % (4 * block);
                wrong += wrong_numbers(sizes[k / 3], block, rows, 1 + (rows + k) % 7, start, kinds + s);
            }
    printf("%s, %lld wrong, %lld wrong bits\n", may_use_tiles() ? "AMX" : "vectors", (long long)wrong,
           (long long)wrong_bits);
    return 0;
}
#else
int main(void) { printf("nobody\n"); }
#endif
