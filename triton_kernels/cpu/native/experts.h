/* A mixture of experts: which experts multiply which rows, and the sum of their results.

   Each row of a step has `chosen` places, one for each of its experts. Places are in the order of experts, then of rows.
   So the rows of an expert are adjacent, once they are gathered in the order of places. */
#pragma once
#include "vectors.h"

/* Where the rows of a step go. All arrays are in one register, see routing_words in library.py. */
typedef struct {
    int32_t *num_active;              /* experts that have rows */
    int32_t *expert_of;               /* [experts] the first num_active of them: these experts, in ascending order */
    int32_t *first_of;                /* [experts + 1] the first place of each of these, then the number of places */
    int32_t *next_of;                 /* [experts] of each expert: its next place, while places are given */
    int32_t *row_of;                  /* [rows * chosen] the row of each place */
    int32_t *place_of;                /* [rows][chosen] the places of a row, in ascending order of experts */
    float *weight_of;                 /* [rows][chosen] the weights of these experts */
} Routing;

INLINE Routing routing_in(void *memory, int64_t rows, int64_t experts, int64_t chosen) {
    int32_t *words = memory;
    int32_t *expert_of = words + 1, *first_of = expert_of + experts, *next_of = first_of + experts + 1;
    int32_t *row_of = next_of + experts, *place_of = row_of + rows * chosen;
    return (Routing){words, expert_of, first_of, next_of, row_of, place_of, (float *)(place_of + rows * chosen)};
}

/* Whether a logit is chosen before another one of a lower number. NaN is the largest, as in torch. */
INLINE int is_before(float logit, float other) { return logit > other || (logit != logit && other == other); }

/* Return the sum of e^(logit - largest) over `count` logits. */
INLINE float sum_of_weights(const void *logits, int64_t count, float largest, int type) {
    floats sums = all(0);
    for (int64_t i = 0; i < count; i += LANES) {
        floats some = all(-INFINITY);
        if (count - i >= LANES) some = load(logits, i, type);
        else for (int64_t lane = 0; i + lane < count; lane++) some[lane] = load_one(logits, i + lane, type);
        sums += exponential(some - largest);
    }
    return sum(sums);
}

/* Choose the experts of a row: those with the largest logits; among equal ones, those with lower numbers.

   experts_of   [chosen] their numbers, in ascending order
   weight_of    [chosen] their shares of the softmax over all logits, or over theirs if is_renormalised */
static void choose_experts(const void *logits, int64_t experts, int64_t chosen, int is_renormalised, int32_t *experts_of,
                           float *weight_of, int type) {
    for (int64_t expert = 0; expert < experts; expert++) {        /* sorted by logit, while they are chosen */
        float logit = load_one(logits, expert, type);
        int64_t at = expert < chosen ? expert : chosen;
        if (at == chosen && !is_before(logit, weight_of[--at])) continue;
        for (; at > 0 && is_before(logit, weight_of[at - 1]); at--)
            weight_of[at] = weight_of[at - 1], experts_of[at] = experts_of[at - 1];
        weight_of[at] = logit, experts_of[at] = (int32_t)expert;
    }
    float largest = weight_of[0];
    float total = is_renormalised ? sum_of_weights(weight_of, chosen, largest, FLOAT32)
                                  : sum_of_weights(logits, experts, largest, type);
    for (int64_t i = 0; i < chosen; i++) {                        /* sorted by number */
        float weight = exponential(all(weight_of[i] - largest))[0] / total;
        int32_t expert = experts_of[i];
        int64_t at = i;
        for (; at > 0 && experts_of[at - 1] > expert; at--)
            weight_of[at] = weight_of[at - 1], experts_of[at] = experts_of[at - 1];
        weight_of[at] = weight, experts_of[at] = expert;
    }
}

/* Choose the experts of all rows, and give each row its places. */
static void route(const Routing *r, const char *logits, int64_t stride, int64_t rows, int64_t experts, int64_t chosen,
                  int is_renormalised, int type) {
    int32_t active = 0, places = 0;
    memset(r->next_of, 0, (size_t)experts * sizeof *r->next_of);
    for (int64_t row = 0; row < rows; row++) {
        int32_t *numbers = r->place_of + row * chosen;
        choose_experts(logits + row * stride * bytes_of(type), experts, chosen, is_renormalised, numbers,
                       r->weight_of + row * chosen, type);
        for (int64_t i = 0; i < chosen; i++) r->next_of[numbers[i]]++;
    }
    for (int32_t expert = 0; expert < experts; expert++) {
        int32_t count = r->next_of[expert];
        r->next_of[expert] = places;
        if (!count) continue;
        r->expert_of[active] = expert, r->first_of[active++] = places;
        places += count;
    }
    *r->num_active = active, r->first_of[active] = places;
    for (int64_t i = 0; i < rows * chosen; i++) {                 /* a number becomes a place */
        int32_t place = r->next_of[r->place_of[i]]++;
        r->place_of[i] = place, r->row_of[place] = (int32_t)(i / chosen);
    }
}

/* y = the sum of the results of a row's experts times their weights, in the order of experts; or y plus this sum.

   results   of all places, `stride` entries apart */
INLINE void combine_row(const Routing *r, int64_t row, int64_t chosen, const char *results, int64_t stride, void *y,
                        int64_t size, int adds, int type) {
    const int32_t *places = r->place_of + row * chosen;
    const float *weights = r->weight_of + row * chosen;
    int64_t i = 0, width = stride * bytes_of(type);
    for (; i + LANES <= size; i += LANES) {
        floats total = all(0);
        for (int64_t j = 0; j < chosen; j++) total += load(results + places[j] * width, i, type) * weights[j];
        store(y, i, adds ? load(y, i, type) + total : total, type);
    }
    for (; i < size; i++) {
        float total = 0;
        for (int64_t j = 0; j < chosen; j++) total += load_one(results + places[j] * width, i, type) * weights[j];
        store_one(y, i, adds ? load_one(y, i, type) + total : total, type);
    }
}
