/* y = x W^T (+ b) (+ y): rows of x times a packed matrix.

   Packed: panels of 16 outputs. In bfloat16 a panel is [inputs / 2][16][2], so that one load has two inputs of each of
   16 outputs, which is what a vdpbf16ps and a tile of AMX take alike; inputs are padded with zeros to a multiple of 32.
   In float32 it is [inputs][16]. Rows of x may be read up to that multiple: what lies there must be finite. */
#pragma once
#include "tiles.h"

#define PANEL 16
#define INPUTS_ALIGNED 32

typedef struct {
    int64_t inputs, outputs;          /* inputs: padded */
    const void *panels;
    const float *bias;                /* NULL: none */
    int type;
} Matrix;

/* How far ahead of its use a matrix is asked for: the processor does so itself only within 4 KiB. */
#define AHEAD_BYTES 2048

/* Panels that a thread multiplies with before it asks for more work. */
#define MOST_PANELS_A_PIECE 8

INLINE int64_t num_panels(const Matrix *m) { return (m->outputs + PANEL - 1) / PANEL; }
INLINE int64_t panel_bytes(const Matrix *m) { return m->inputs * PANEL * bytes_of(m->type); }

/* What is done with sixteen sums of one row. */
typedef struct {
    void *rows;                       /* y; row r starts r * stride entries in */
    int64_t stride;
    int type;                         /* of y */
    int adds;                         /* y is added to */
} Target;

INLINE void finish(const Matrix *m, const Target *t, int64_t row, int64_t panel, floats sums) {
    int64_t first = panel * PANEL, left = m->outputs - first;
    if (m->bias) {
        if (left >= PANEL) sums += *(const floats *)(m->bias + first);
        else for (int64_t i = 0; i < left; i++) sums[i] += m->bias[first + i];
    }
    void *y = (char *)t->rows + row * t->stride * bytes_of(t->type);
    if (left >= PANEL) {
        if (t->adds) sums += load(y, first, t->type);
        store(y, first, sums, t->type);
    } else {
        for (int64_t i = 0; i < left; i++) {
            float value = sums[i];
            if (t->adds) value += load_one(y, first + i, t->type);
            store_one(y, first + i, value, t->type);
        }
    }
}

/* R rows times P panels, in bfloat16. */
#define BF16_BLOCK(R, P)                                                                                              \
    static void bf16_##R##x##P(const Matrix *m, const uint16_t *x, int64_t stride, const Target *t, int64_t row,      \
                               int64_t panel) {                                                                       \
        const uint32_t *w[P];                                                                                         \
        floats sums[R][P];                                                                                            \
        for (int p = 0; p < P; p++)                                                                                   \
            w[p] = (const uint32_t *)((const char *)m->panels + (panel + p) * panel_bytes(m));                        \
        for (int r = 0; r < R; r++)                                                                                   \
            for (int p = 0; p < P; p++) sums[r][p] = all(0);                                                          \
        for (int64_t k = 0; k < m->inputs / 2; k++) {                                                                 \
            words v[P];                                                                                               \
            for (int p = 0; p < P; p++) v[p] = *(const words *)(w[p] + k * PANEL);                                    \
            for (int p = 0; p < P; p++) prefetch((const char *)(w[p] + k * PANEL) + AHEAD_BYTES);                     \
            for (int r = 0; r < R; r++) {                                                                             \
                uint32_t two;                                                                                         \
                memcpy(&two, x + r * stride + 2 * k, 4);                                                              \
                for (int p = 0; p < P; p++) sums[r][p] = add_pairs(sums[r][p], two, v[p]);                            \
            }                                                                                                         \
        }                                                                                                             \
        for (int r = 0; r < R; r++)                                                                                   \
            for (int p = 0; p < P; p++) finish(m, t, row + r, panel + p, sums[r][p]);                                 \
    }

#define F32_BLOCK(R, P)                                                                                               \
    static void f32_##R##x##P(const Matrix *m, const float *x, int64_t stride, const Target *t, int64_t row,          \
                              int64_t panel) {                                                                        \
        const float *w[P];                                                                                            \
        floats sums[R][P];                                                                                            \
        for (int p = 0; p < P; p++)                                                                                   \
            w[p] = (const float *)((const char *)m->panels + (panel + p) * panel_bytes(m));                           \
        for (int r = 0; r < R; r++)                                                                                   \
            for (int p = 0; p < P; p++) sums[r][p] = all(0);                                                          \
        for (int64_t k = 0; k < m->inputs; k++) {                                                                     \
            floats v[P];                                                                                              \
            for (int p = 0; p < P; p++) v[p] = *(const floats *)(w[p] + k * PANEL);                                   \
            for (int p = 0; p < P; p++) prefetch((const char *)(w[p] + k * PANEL) + AHEAD_BYTES);                     \
            for (int r = 0; r < R; r++)                                                                               \
                for (int p = 0; p < P; p++) sums[r][p] += v[p] * x[r * stride + k];                                   \
        }                                                                                                             \
        for (int r = 0; r < R; r++)                                                                                   \
            for (int p = 0; p < P; p++) finish(m, t, row + r, panel + p, sums[r][p]);                                 \
    }

BF16_BLOCK(1, 1) BF16_BLOCK(1, 4) BF16_BLOCK(2, 4) BF16_BLOCK(3, 4) BF16_BLOCK(4, 4)
BF16_BLOCK(2, 1) BF16_BLOCK(3, 1) BF16_BLOCK(4, 1)
BF16_BLOCK(5, 2) BF16_BLOCK(6, 2) BF16_BLOCK(7, 2) BF16_BLOCK(8, 2)
BF16_BLOCK(5, 1) BF16_BLOCK(6, 1) BF16_BLOCK(7, 1) BF16_BLOCK(8, 1)
F32_BLOCK(1, 1) F32_BLOCK(1, 4) F32_BLOCK(2, 4) F32_BLOCK(3, 4) F32_BLOCK(4, 4)
F32_BLOCK(2, 1) F32_BLOCK(3, 1) F32_BLOCK(4, 1)
F32_BLOCK(5, 2) F32_BLOCK(6, 2) F32_BLOCK(7, 2) F32_BLOCK(8, 2)
F32_BLOCK(5, 1) F32_BLOCK(6, 1) F32_BLOCK(7, 1) F32_BLOCK(8, 1)

#define MOST_ROWS 8
typedef void (*Bf16Block)(const Matrix *, const uint16_t *, int64_t, const Target *, int64_t, int64_t);
typedef void (*F32Block)(const Matrix *, const float *, int64_t, const Target *, int64_t, int64_t);
static const Bf16Block bf16_blocks[MOST_ROWS + 1] = {0, bf16_1x4, bf16_2x4, bf16_3x4, bf16_4x4,
                                                     bf16_5x2, bf16_6x2, bf16_7x2, bf16_8x2};
static const Bf16Block bf16_single[MOST_ROWS + 1] = {0, bf16_1x1, bf16_2x1, bf16_3x1, bf16_4x1,
                                                     bf16_5x1, bf16_6x1, bf16_7x1, bf16_8x1};
static const F32Block f32_blocks[MOST_ROWS + 1] = {0, f32_1x4, f32_2x4, f32_3x4, f32_4x4,
                                                   f32_5x2, f32_6x2, f32_7x2, f32_8x2};
static const F32Block f32_single[MOST_ROWS + 1] = {0, f32_1x1, f32_2x1, f32_3x1, f32_4x1,
                                                   f32_5x1, f32_6x1, f32_7x1, f32_8x1};

#if defined(HAS_TILES)
#define FEWEST_ROWS_OF_TILES 2

/* The sums of some rows and one panel, or two that adjoin: those of 32 outputs are one line of y in bfloat16. */
INLINE void finish_tiles(const Matrix *m, const Target *t, int64_t row, int rows, int64_t panel, int panels,
                         const float sums[2][TILE_ROWS * PANEL]) {
    int64_t first = panel * PANEL;
    if (panels == 1 || t->type == FLOAT32 || m->outputs - first < 2 * PANEL) {
        for (int p = 0; p < panels; p++)
            for (int r = 0; r < rows; r++) finish(m, t, row + r, panel + p, *(const floats *)(sums[p] + r * PANEL));
        return;
    }
    for (int r = 0; r < rows; r++) {
        floats low = *(const floats *)(sums[0] + r * PANEL), high = *(const floats *)(sums[1] + r * PANEL);
        uint16_t *y = (uint16_t *)t->rows + (row + r) * t->stride + first;
        if (m->bias) low += *(const floats *)(m->bias + first), high += *(const floats *)(m->bias + first + PANEL);
        if (t->adds) low += load(y, 0, BFLOAT16), high += load(y, PANEL, BFLOAT16);
        _mm512_storeu_si512(y, (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low));
    }
}

/* Up to 32 rows times one or two panels. Tiles 0 to 3 have the sums of (upper, lower) rows x two panels, 4 and 5 rows of
   x, 6 and 7 panels. is_first: the panels have not been read in this step. */
INLINE void tiles(const Matrix *m, const uint16_t *x, int64_t stride, const Target *t, int64_t row, int upper,
                  int lower, int64_t panel, int panels, int is_first) {
    const char *first = (const char *)m->panels + panel * panel_bytes(m), *second = first + panel_bytes(m);
    float sums[2][TILE_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t pitch = stride * 2;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t k = 0; k < m->inputs; k += 32) {
        if (is_first)
            for (int i = 0; i < 16; i++) {
                prefetch(first + k * PANEL * 2 + i * LINE_BYTES + AHEAD_BYTES);
                if (panels > 1) prefetch(second + k * PANEL * 2 + i * LINE_BYTES + AHEAD_BYTES);
            }
        _tile_loadd(4, x + k, pitch);
        _tile_loadd(6, first + k * PANEL * 2, 64);
        _tile_dpbf16ps(0, 4, 6);
        if (panels > 1) {
            _tile_loadd(7, second + k * PANEL * 2, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if (lower) {
            _tile_loadd(5, x + 16 * stride + k, pitch);
            _tile_dpbf16ps(2, 5, 6);
            if (panels > 1) _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, sums[0], 64);
    if (panels > 1) _tile_stored(1, sums[1], 64);
    finish_tiles(m, t, row, upper, panel, panels, sums);
    if (lower) {
        _tile_stored(2, sums[0], 64);
        if (panels > 1) _tile_stored(3, sums[1], 64);
        finish_tiles(m, t, row + TILE_ROWS, lower, panel, panels, sums);
    }
}

static void multiply_in_tiles(const Matrix *m, const uint16_t *x, int64_t stride, int64_t rows, const Target *t,
                              int64_t first, int64_t end) {
    int shaped = -1;
    for (int64_t row = 0; row < rows; row += 32) {
        int count = rows - row < 32 ? (int)(rows - row) : 32, upper = count < 16 ? count : 16, lower = count - upper;
        uint8_t up = (uint8_t)upper, low = (uint8_t)(lower ? lower : 1);
        if (count != shaped) shape_tiles((const uint8_t[8]){up, up, low, low, up, low, 16, 16}), shaped = count;
        for (int64_t panel = first; panel < end; panel += 2) {
            int panels = end - panel < 2 ? 1 : 2;
            /* Most calls, compiled apart: nothing is decided in their loop. */
            if (lower && panels == 2) tiles(m, x + row * stride, stride, t, row, upper, lower, panel, 2, row == 0);
            else tiles(m, x + row * stride, stride, t, row, upper, lower, panel, panels, row == 0);
        }
    }
    _tile_release();
}
#endif

/* All rows times the panels first .. end - 1. x has the matrix's type. */
static void multiply(const Matrix *m, const void *x, int64_t stride, int64_t rows, const Target *t, int64_t first,
                     int64_t end) {
#if defined(HAS_TILES)
    if (m->type == BFLOAT16 && rows >= FEWEST_ROWS_OF_TILES && may_use_tiles()) {
        multiply_in_tiles(m, x, stride, rows, t, first, end);
        return;
    }
#endif
    for (int64_t row = 0; row < rows;) {
        int count = rows - row < MOST_ROWS ? (int)(rows - row) : MOST_ROWS, wide = count <= 4 ? 4 : 2;
        int64_t panel = first;
        if (m->type == BFLOAT16) {
            const uint16_t *from = (const uint16_t *)x + row * stride;
            for (; panel + wide <= end; panel += wide) bf16_blocks[count](m, from, stride, t, row, panel);
            for (; panel < end; panel++) bf16_single[count](m, from, stride, t, row, panel);
        } else {
            const float *from = (const float *)x + row * stride;
            for (; panel + wide <= end; panel += wide) f32_blocks[count](m, from, stride, t, row, panel);
            for (; panel < end; panel++) f32_single[count](m, from, stride, t, row, panel);
        }
        row += count;
    }
}

/* The largest output of each row among the panels first .. end - 1, of which there are MOST_PANELS_A_PIECE at most, and the lowest index of those that equal it. The
   products stay in the processor's cache. NaN where one is. */
#define ROWS_OF_LARGEST 32

static void largest_outputs(const Matrix *m, const void *x, int64_t stride, int64_t rows, int64_t first, int64_t end,
                            float *largest_of, int64_t *index_of) {
    float products[ROWS_OF_LARGEST * MOST_PANELS_A_PIECE * PANEL] __attribute__((aligned(64)));
    int64_t width = (end - first) * PANEL, count = m->outputs - first * PANEL;
    if (count > width) count = width;
    for (int64_t row = 0; row < rows; row += ROWS_OF_LARGEST) {
        int64_t some = rows - row < ROWS_OF_LARGEST ? rows - row : ROWS_OF_LARGEST;
        /* `multiply` counts columns from the first panel of the matrix. */
        Target t = {products - first * PANEL, width, FLOAT32, 0};
        multiply(m, (const char *)x + row * stride * bytes_of(m->type), stride, some, &t, first, end);
        for (int64_t r = 0; r < some; r++) {
            float *found = products + r * width;
            for (int64_t i = count; i < width; i++) found[i] = -INFINITY;
            floats best = all(-INFINITY);
            integers where = all_integers(0), is_nan = all_integers(0);
            for (int64_t i = 0; i < width; i += LANES) {
                floats v = *(const floats *)(found + i);
                integers is_larger = v > best, here = FIRST_INTEGERS + (int32_t)i;
                best = (floats)(((integers)v & is_larger) | ((integers)best & ~is_larger));
                where = (here & is_larger) | (where & ~is_larger);
                is_nan |= v != v;
            }
            float top = best[0];
            int64_t index = where[0];
            int has_nan = is_nan[0];
            for (int lane = 1; lane < LANES; lane++) {
                if (best[lane] > top || (best[lane] == top && where[lane] < index)) top = best[lane], index = where[lane];
                has_nan |= is_nan[lane];
            }
            largest_of[row + r] = has_nan ? NAN : top;
            index_of[row + r] = first * PANEL + index;
        }
    }
}

/* Fill `panels` from a plain matrix [outputs, plain_inputs], whose rows are row_stride entries apart. */
static void pack(const Matrix *m, const void *plain, int64_t plain_inputs, int64_t row_stride, int64_t first,
                 int64_t end) {
    for (int64_t panel = first; panel < end; panel++) {
        char *to = (char *)m->panels + panel * panel_bytes(m);
        memset(to, 0, (size_t)panel_bytes(m));
        for (int64_t n = 0; n < PANEL && panel * PANEL + n < m->outputs; n++) {
            const char *row = (const char *)plain + (panel * PANEL + n) * row_stride * bytes_of(m->type);
            if (m->type == FLOAT32)
                for (int64_t k = 0; k < plain_inputs; k++) ((float *)to)[k * PANEL + n] = ((const float *)row)[k];
            else
                for (int64_t k = 0; k < plain_inputs; k++)
                    ((uint16_t *)to)[(k / 2 * PANEL + n) * 2 + k % 2] = ((const uint16_t *)row)[k];
        }
    }
}
