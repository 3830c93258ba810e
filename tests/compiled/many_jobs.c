/* Runs many jobs one after the other, on one to four threads. All have the same results. For the sanitizers. */
#include "step.c"
#include <stdio.h>
#include <unistd.h>

enum { INPUTS = 64, OUTPUTS = 256, ROWS = 40, OPERATIONS = 6, JOBS = 200 };

/* Attention of three bfloat16 sequences, one with many rows. It stays within the pool's pages and the registers. */
static int attention_jobs(void) {
    enum { HEADS = 14, KEY_HEADS = 2, SIZE = 64, BLOCK = 32, BLOCKS = 44, TOKENS = 12, WIDTH = (HEADS + 2 * KEY_HEADS) * SIZE };
    size_t pool_bytes = (size_t)BLOCKS * 2 * KEY_HEADS * BLOCK * SIZE * 2;
    uint16_t *pool = aligned_alloc(64, pool_bytes), *x = aligned_alloc(64, TOKENS * WIDTH * 2);
    uint16_t *y = aligned_alloc(64, TOKENS * HEADS * SIZE * 2), *kept = malloc(TOKENS * HEADS * SIZE * 2);
    for (size_t i = 0; i < pool_bytes / 2; i++) pool[i] = (uint16_t)(0x3f00 + i % 97);
    for (int i = 0; i < TOKENS * WIDTH; i++) x[i] = (uint16_t)(0x3e00 + i % 251);
    Cache cache = {(char *)pool, 1, KEY_HEADS, BLOCK, SIZE, HEADS, BFLOAT16};
    int32_t positions[TOKENS] = {1200, 5}, starts[] = {0, 1, 2, TOKENS}, tables[3][40] = {{0}, {0}, {2, 3}};
    int64_t slots[TOKENS] = {(4 + 1200 / BLOCK) * BLOCK + 1200 % BLOCK, 5};      /* the first one is cut into parts */
    for (int i = 0; i < 40; i++) tables[0][i] = 4 + i;
    for (int i = 2; i < TOKENS; i++) positions[i] = 28 + i, slots[i] = tables[2][(28 + i) / BLOCK] * BLOCK + (28 + i) % BLOCK;
    char *registers[2] = {(char *)x, (char *)y};
    Step step = {.rows = TOKENS, .registers = registers, .cache = &cache, .positions = positions, .pool_slots = slots,
                 .query_starts = starts, .block_tables = tables[0], .num_sequences = 3, .table_stride = 40, .type = BFLOAT16};
    double scales[2] = {0.125, 1};
    int64_t bits[2];
    memcpy(bits, scales, sizeof bits);
    Operation operations[2] = {
        {{ROTATE_AND_APPEND, 0, WIDTH, 0, 0, WIDTH, HEADS * SIZE, 0, WIDTH, (HEADS + KEY_HEADS) * SIZE, 0, 0, 0, 0}},
        {{ATTEND, 0, WIDTH, 0, 1, HEADS * SIZE, 0, 0, bits[0], 0, 0, 0, 0, 0, 0, bits[1]}}};
    int wrong = 0;
    for (int job = 0; job < JOBS; job++) {
        memset(y, 0xff, TOKENS * HEADS * SIZE * 2);
        run_step(&step, operations, 2, 1 + job % 4);
        if (job == 0) memcpy(kept, y, TOKENS * HEADS * SIZE * 2);
        wrong += memcmp(kept, y, TOKENS * HEADS * SIZE * 2) != 0;
        for (int i = 0; i < TOKENS * HEADS * SIZE; i++) wrong += load_one(y, i, BFLOAT16) > 2 || !(load_one(y, i, BFLOAT16) > 0);
    }
    free(pool), free(x), free(y), free(kept);
    return wrong;
}

int main(void) {
    float *weight = aligned_alloc(64, OUTPUTS * INPUTS * 4), *panels = aligned_alloc(64, OUTPUTS * INPUTS * 4);
    float *x = aligned_alloc(64, ROWS * INPUTS * 4), *y = aligned_alloc(64, ROWS * OUTPUTS * 4);
    for (int i = 0; i < OUTPUTS * INPUTS; i++) weight[i] = (float)(i % 7 - 3);
    for (int i = 0; i < ROWS * INPUTS; i++) x[i] = (float)(i % 5 - 2);
    Matrix matrix = {INPUTS, OUTPUTS, panels, 0, FLOAT32};
    pack_matrix(&matrix, weight, INPUTS, INPUTS);

    char *registers[2] = {(char *)x, (char *)y};
    Step step = {.rows = ROWS, .registers = registers, .type = FLOAT32};
    Operation operations[OPERATIONS] = {0};
    for (int i = 0; i < OPERATIONS; i++) {      /* the first one writes y, the others add to it */
        int64_t numbers[] = {PRODUCT, 0, INPUTS, 0, 1, OUTPUTS, 0, (intptr_t)&matrix, i > 0, FLOAT32};
        memcpy(operations[i].number, numbers, sizeof numbers);
    }
    double first = 0;
    int wrong = 0;
    for (int job = 0; job < JOBS; job++) {
        run_step(&step, operations, OPERATIONS, 1 + job % 4);
        double sum_of_all = 0;
        for (int i = 0; i < ROWS * OUTPUTS; i++) sum_of_all += y[i] * (i % 13);
        if (job == 0) first = sum_of_all;
        wrong += sum_of_all != first;
        if (job % 50 == 0) usleep(3000);       /* helpers fall asleep */
        if (job % 30 == 7) stop_helpers();
    }
    int64_t index[ROWS];
    float largest[ROWS];
    run_step(&step, operations, 1, 1);
    for (int job = 0; job < JOBS; job++) {
        wrong += largest_outputs_of(&matrix, x, INPUTS, ROWS, index, largest, 1 + job % 4);
        for (int row = 0; row < ROWS; row++) wrong += y[row * OUTPUTS + index[row]] != largest[row];
    }
    wrong += attention_jobs();
    printf("%d wrong\n", wrong);
    free(weight), free(panels), free(x), free(y);
    return wrong != 0;
}
