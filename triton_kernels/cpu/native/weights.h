/* Unnormalised probabilities of tokens: what sampling and log-probabilities read of whole rows of logits. */
#pragma once
#include "vectors.h"

#define WEIGHTS_PER_SUM 64

/* Compute the weights e^((logit - maximum) * inverse) of each row, and their sums. The bits of a row depend on that row
   alone. A weight is 0 if the logit is below the floor.

   logits    [rows][count], rows stride entries apart
   inverse, maxima, floors   [rows]; floors NULL: none
   weights   [rows][count], or NULL
   sums      [rows][blocks of 64 logits], or NULL
   totals    [rows] of all sums, or NULL */
static void weigh_rows(const float *logits, int64_t stride, int64_t rows, int64_t count, const float *inverse,
                       const float *maxima, const float *floors, float *weights, float *sums, double *totals) {
    int64_t blocks = (count + WEIGHTS_PER_SUM - 1) / WEIGHTS_PER_SUM;
    for (int64_t row = 0; row < rows; row++) {
        double total = 0;
        for (int64_t block = 0; block < blocks; block++) {
            const float *from = logits + row * stride + block * WEIGHTS_PER_SUM;
            float last[WEIGHTS_PER_SUM], found[WEIGHTS_PER_SUM];
            int64_t left = count - block * WEIGHTS_PER_SUM;
            if (left < WEIGHTS_PER_SUM) {
                for (int64_t i = 0; i < WEIGHTS_PER_SUM; i++) last[i] = i < left ? from[i] : -INFINITY;
                from = last;
            } else left = WEIGHTS_PER_SUM;
            floats sum_of_block = all(0);
            for (int64_t i = 0; i < WEIGHTS_PER_SUM; i += LANES) {
                floats x = load(from, i, FLOAT32);
                floats weight = exponential((x - maxima[row]) * inverse[row]);
                if (floors) weight = (floats)((integers)weight & ~(integers)(x < floors[row]));
                *(floats *)(found + i) = weight;
                sum_of_block += weight;
            }
            float sum_here = sum(sum_of_block);
            if (weights) memcpy(weights + row * count + block * WEIGHTS_PER_SUM, found, sizeof(float) * (size_t)left);
            if (sums) sums[row * blocks + block] = sum_here;
            total += sum_here;
        }
        if (totals) totals[row] = total;
    }
}
