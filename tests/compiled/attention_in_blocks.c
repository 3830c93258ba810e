/* Attention of many rows in blocks (`attend_in_tiles`) against attention row by row (`attend`): the results differ only
   by the rounding of weights to bfloat16. Prints the unit that computes the blocks, and the number of wrong results. */
#include "step.c"
#include <stdio.h>
#include <stdlib.h>

#if defined(HAS_ATTENTION_TILES)
enum { BLOCKS = 12, KEY_HEADS = 2, LAYERS = 2 };
static uint32_t seed = 1;

static uint16_t random_bfloat16(void) {
    seed = seed * 1664525 + 1013904223;
    return narrow(all((float)(seed >> 8) / (1 << 23) - 1))[0];
}

static int64_t wrong_numbers(int64_t size, int64_t block, int rows, int group, int64_t start, const Scores *how) {
    static uint16_t pool[BLOCKS * LAYERS * 2 * KEY_HEADS * 128 * 256] __attribute__((aligned(64)));
    static uint16_t queries[MAX_QUERY_ROWS * MAX_HEAD_SIZE] __attribute__((aligned(64)));
    static Partial expected, found;
    Cache c = {(char *)pool, LAYERS, KEY_HEADS, block, size, KEY_HEADS * group, BFLOAT16};
    int32_t blocks[BLOCKS];
    float slopes[MAX_QUERY_ROWS];
    int64_t position[MAX_QUERY_ROWS], wrong = 0, last = start + (rows - 1) / group;
    for (int64_t i = 0; i < BLOCKS * LAYERS * 2 * KEY_HEADS * block * size; i++) pool[i] = random_bfloat16();
    for (int i = 0; i < rows * size; i++) queries[i] = random_bfloat16();
    for (int i = 0; i < BLOCKS; i++) blocks[i] = i * 5 % BLOCKS;
    for (int row = 0; row < rows; row++) position[row] = start + row / group;
    for (int row = 0; row < rows; row++) slopes[row] = 0.25f * (float)(row % group - 1);
    char *keys = (char *)page_of(&c, blocks[last / block], 1, 0, 1);     /* after the last token: not written yet */
    char *values = (char *)page_of(&c, blocks[last / block], 1, 1, 1);
    int64_t written = (last % block + 1) * size * 2;
    memset(keys + written, 0xff, block * size * 2 - written);
    memset(values + written, 0xff, block * size * 2 - written);
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
    return wrong;
}

int main(void) {
    const int64_t sizes[] = {32, 64, 96, 128, 256}, sizes_of_blocks[] = {32, 64, 128};
    const float some = 0;                             /* not read: Task has the slope of each row */
    const Scores kinds[] = {{0.3f, 0, 0, 0}, {0.2f, 1.5f, 0, 0}, {0.3f, 0, 50, 0}, {0.3f, 0, 50, 20}, {2.0f, 0, 1, 3},
                            {0.3f, 0, 0, 0, &some}, {0.2f, 1.5f, 50, 20, &some}, {0.3f, 0, 0, 0, &some, 0.25f}};
    int64_t wrong = 0;
    Cache c = {.type = BFLOAT16, .block_tokens = 32, .head_size = 64};
    int fewest = 1;
    while (fewest < MAX_QUERY_ROWS && !fits_tiles(&c, fewest)) fewest++;
    for (int k = 0; k < 15; k++)
        for (int rows = 1; rows <= MAX_QUERY_ROWS; rows += rows % 5 + 1)
            for (int s = 0; s < 8; s++) {
                int64_t block = sizes_of_blocks[k % 3], start = (rows * 37 + k * 11 + s) % (4 * block);
                wrong += wrong_numbers(sizes[k / 3], block, rows, 1 + (rows + k) % 7, start, kinds + s);
            }
    printf("%s from %d rows on, %lld wrong\n", may_use_tiles() ? "AMX" : "vectors", fewest, (long long)wrong);
    return 0;
}
#else
int main(void) { printf("nobody\n"); }
#endif
