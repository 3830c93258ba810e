/* Many jobs one after the other, on one to four threads: the same numbers each time. For the sanitizers. */
#include "step.c"
#include <stdio.h>
#include <unistd.h>

enum { INPUTS = 64, OUTPUTS = 256, ROWS = 40, OPERATIONS = 6, JOBS = 200 };

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
    }
    printf("%d wrong\n", wrong);
    free(weight), free(panels), free(x), free(y);
    return wrong != 0;
}
