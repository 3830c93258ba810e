/* A weight matrix in panels of 16 outputs, and where a product goes. */
#pragma once
#include "vectors.h"

#define PANEL 16
#define INPUTS_ALIGNED 32

/* Vectors per panel. */
#define PARTS (PANEL / LANES)

/* Adjacent panels in the blocks of one type, see quantised.h. */
typedef struct {
    int64_t first_panel, end_panel, type;
    int64_t group_blocks, scale_type; /* of types with groups: blocks of a group, and type of the scales in vectors.h */
    uint8_t *panels;                  /* of first_panel */
} QuantisedPart;

/* is_uniform: rows alone get the bits that they get among others, in each product. Without it, one row is multiplied by
   vectors and several rows are multiplied by AMX tiles, whose sums have another order. No effect without AMX. */
typedef struct {
    int64_t inputs, outputs;          /* inputs: padded to a multiple of INPUTS_ALIGNED */
    const void *panels;               /* of a matrix of numbers, see products.h */
    const float *bias;                /* NULL: none */
    int type;                         /* of the numbers, or of the rows that a quantised matrix multiplies */
    float factor;                     /* on the products of a quantised matrix, before the bias */
    const QuantisedPart *parts;       /* of a quantised matrix; NULL: a matrix of numbers */
    int64_t num_parts;
    int64_t is_uniform;
    int64_t has_byte_rows;            /* whether a quantised matrix multiplies rows that are rounded to bytes */
} Matrix;

INLINE int64_t num_panels(const Matrix *m) { return (m->outputs + PANEL - 1) / PANEL; }

/* The result y. */
typedef struct {
    void *rows;                       /* row r starts at entry r * stride */
    int64_t stride;
    int type;
    int adds;                         /* add to y instead of overwriting it */
} Target;

/* Write LANES sums of a row to y, starting at output `first`. */
INLINE void finish(const Matrix *m, const Target *t, int64_t row, int64_t first, floats sums) {
    int64_t left = m->outputs - first;
    void *y = (char *)t->rows + row * t->stride * bytes_of(t->type);
    if (left >= LANES) {
        if (m->bias) sums += *(const floats *)(m->bias + first);
        if (t->adds) sums += load(y, first, t->type);
        store(y, first, sums, t->type);
        return;
    }
    for (int64_t i = 0; i < left; i++) {
        float value = sums[i];
        if (m->bias) value += m->bias[first + i];
        if (t->adds) value += load_one(y, first + i, t->type);
        store_one(y, first + i, value, t->type);
    }
}
