/* y = x W^T (+ b) (+ y): rows of x times a packed matrix.

   A packed matrix consists of panels of 16 outputs. A bfloat16 panel is [inputs / 2][16][2]: one load has two inputs of
   each of 16 outputs, as both vdpbf16ps and AMX tiles expect. A float32 panel is [inputs][16]. Inputs are padded with
   zeros to a multiple of 32. Rows of x are read up to this multiple, so the memory after their end must be finite. */
#pragma once
#include "matrix.h"
#include "quantised.h"
#include "tiles.h"

/* Prefetch distance in a matrix: the hardware prefetcher stays within a page of 4 KiB. */
#define AHEAD_BYTES 2048

/* Maximum number of panels of a piece of work. */
#define MAX_PANELS_PER_PIECE 8

INLINE int64_t panel_bytes(const Matrix *m) { return m->inputs * PANEL * bytes_of(m->type); }

/* A range of inputs. Between ranges, `sums` [rows][OUTPUTS_PER_PIECE] holds the partial sums. */
typedef struct {
    int64_t first, count;
    int is_last;
    float *sums;
} Slice;
#define OUTPUTS_PER_PIECE (MAX_PANELS_PER_PIECE * PANEL)

/* Begin and end of a multiplication of R rows with P panels; `at` is the index of the first panel in the piece. */
#define BEGIN_BLOCK(R, P, TYPE)                                                                                       \
    const TYPE *w[P];                                                                                                 \
    floats sums[R][P * PARTS];                                                                                        \
    for (int p = 0; p < P; p++)                                                                                       \
        w[p] = (const TYPE *)((const char *)m->panels + (panel + p) * panel_bytes(m)                                  \
                              + s->first * PANEL * bytes_of(m->type));                                                \
    for (int r = 0; r < R; r++)                                                                                       \
        for (int v = 0; v < P * PARTS; v++)                                                                           \
            sums[r][v] = s->first ? *(floats *)(s->sums + r * OUTPUTS_PER_PIECE + at * PANEL + v * LANES) : all(0);
#define FINISH_BLOCK(R, P)                                                                                            \
    for (int r = 0; r < R; r++)                                                                                       \
        for (int v = 0; v < P * PARTS; v++) {                                                                         \
            if (s->is_last) finish(m, t, row + r, panel * PANEL + v * LANES, sums[r][v]);                             \
            else *(floats *)(s->sums + r * OUTPUTS_PER_PIECE + at * PANEL + v * LANES) = sums[r][v];                  \
        }

/* Multiply R rows with P panels. */
#if defined(__AVX512BF16__)
typedef uint16_t Bf16Input;
#define ADD_PRODUCTS_OF_PAIRS(R, P)                                                                                   \
    for (int r = 0; r < R; r++) {                                                                                     \
        uint32_t two;                                                                                                 \
        memcpy(&two, x + r * stride + 2 * k, 4);                                                                      \
        for (int v = 0; v < P * PARTS; v++) sums[r][v] = add_pairs(sums[r][v], two, pairs[v]);                        \
    }
#else
/* Without an instruction for pairs, inputs are widened first. The first inputs of all pairs are multiplied before the
   second inputs, so that all operands fit into sixteen registers. */
typedef float Bf16Input;
#define ADD_PRODUCTS_OF_PAIRS(R, P)                                                                                   \
    for (int r = 0; r < R; r++)                                                                                       \
        for (int v = 0; v < P * PARTS; v++) sums[r][v] += first_of(pairs[v]) * x[r * stride + 2 * k];                 \
    for (int r = 0; r < R; r++)                                                                                       \
        for (int v = 0; v < P * PARTS; v++) sums[r][v] += second_of(pairs[v]) * x[r * stride + 2 * k + 1];
#endif

#define BF16_BLOCK(R, P)                                                                                              \
    static void bf16_##R##x##P(const Matrix *m, const Bf16Input *x, int64_t stride, const Slice *s, const Target *t,  \
                               int64_t row, int64_t panel, int64_t at) {                                              \
        BEGIN_BLOCK(R, P, uint32_t)                                                                                   \
        for (int64_t k = 0; k < s->count / 2; k++) {                                                                  \
            words pairs[P * PARTS];                                                                                   \
            for (int v = 0; v < P * PARTS; v++)                                                                       \
                pairs[v] = *(const words *)(w[v / PARTS] + k * PANEL + v % PARTS * LANES);                            \
            for (int p = 0; p < P; p++) prefetch((const char *)(w[p] + k * PANEL) + AHEAD_BYTES);                     \
            ADD_PRODUCTS_OF_PAIRS(R, P)                                                                               \
        }                                                                                                             \
        FINISH_BLOCK(R, P)                                                                                            \
    }

#define F32_BLOCK(R, P)                                                                                               \
    static void f32_##R##x##P(const Matrix *m, const float *x, int64_t stride, const Slice *s, const Target *t,       \
                              int64_t row, int64_t panel, int64_t at) {                                               \
        BEGIN_BLOCK(R, P, float)                                                                                      \
        for (int64_t k = 0; k < s->count; k++) {                                                                      \
            floats weights[P * PARTS];                                                                                \
            for (int v = 0; v < P * PARTS; v++)                                                                       \
                weights[v] = *(const floats *)(w[v / PARTS] + k * PANEL + v % PARTS * LANES);                         \
            for (int p = 0; p < P; p++) prefetch((const char *)(w[p] + k * PANEL) + AHEAD_BYTES);                     \
            for (int r = 0; r < R; r++)                                                                               \
                for (int v = 0; v < P * PARTS; v++) sums[r][v] += weights[v] * x[r * stride + k];                     \
        }                                                                                                             \
        FINISH_BLOCK(R, P)                                                                                            \
    }

/* Block sizes: as many sums as fit into registers with weights and inputs. AVX-512 has 32 registers and one vector per
   panel; AVX2 has 16 registers and two vectors per panel. */
typedef void (*Bf16Block)(const Matrix *, const Bf16Input *, int64_t, const Slice *, const Target *, int64_t, int64_t,
                          int64_t);
typedef void (*F32Block)(const Matrix *, const float *, int64_t, const Slice *, const Target *, int64_t, int64_t,
                         int64_t);
#define BOTH_BLOCKS(R, P) BF16_BLOCK(R, P) F32_BLOCK(R, P)
BOTH_BLOCKS(1, 1) BOTH_BLOCKS(2, 1) BOTH_BLOCKS(3, 1) BOTH_BLOCKS(4, 1) BOTH_BLOCKS(5, 1) BOTH_BLOCKS(6, 1)
#if LANES == 16
BOTH_BLOCKS(7, 1) BOTH_BLOCKS(8, 1)
BOTH_BLOCKS(1, 4) BOTH_BLOCKS(2, 4) BOTH_BLOCKS(3, 4) BOTH_BLOCKS(4, 4)
BOTH_BLOCKS(5, 2) BOTH_BLOCKS(6, 2) BOTH_BLOCKS(7, 2) BOTH_BLOCKS(8, 2)
#define MAX_ROWS 8
#define BLOCKS(TYPE) {0, TYPE##_1x4, TYPE##_2x4, TYPE##_3x4, TYPE##_4x4, TYPE##_5x2, TYPE##_6x2, TYPE##_7x2, TYPE##_8x2}
#define SINGLE_BLOCKS(TYPE) {0, TYPE##_1x1, TYPE##_2x1, TYPE##_3x1, TYPE##_4x1, TYPE##_5x1, TYPE##_6x1, TYPE##_7x1,   \
                             TYPE##_8x1}
INLINE int panels_of_block(int rows) { return rows <= 4 ? 4 : 2; }
#else
BOTH_BLOCKS(1, 4) BOTH_BLOCKS(2, 2)
#define MAX_ROWS 6
#define BLOCKS(TYPE) {0, TYPE##_1x4, TYPE##_2x2, TYPE##_3x1, TYPE##_4x1, TYPE##_5x1, TYPE##_6x1}
#define SINGLE_BLOCKS(TYPE) {0, TYPE##_1x1, TYPE##_2x1, TYPE##_3x1, TYPE##_4x1, TYPE##_5x1, TYPE##_6x1}
INLINE int panels_of_block(int rows) { return rows == 1 ? 4 : rows == 2 ? 2 : 1; }
#endif
static const Bf16Block bf16_blocks[MAX_ROWS + 1] = BLOCKS(bf16), bf16_single[MAX_ROWS + 1] = SINGLE_BLOCKS(bf16);
static const F32Block f32_blocks[MAX_ROWS + 1] = BLOCKS(f32), f32_single[MAX_ROWS + 1] = SINGLE_BLOCKS(f32);

#if defined(HAS_TILES)
#define MIN_ROWS_FOR_TILES 2          /* one row takes less time in vectors */

/* Store the sums of rows for one panel or two adjacent ones: 32 bfloat16 outputs are one cache line of y. */
INLINE void finish_tiles(const Matrix *m, const Target *t, int64_t row, int rows, int64_t panel, int panels,
                         const float sums[2][TILE_ROWS * PANEL]) {
    int64_t first = panel * PANEL;
    if (panels == 1 || t->type == FLOAT32 || m->outputs - first < 2 * PANEL) {
        for (int p = 0; p < panels; p++)
            for (int r = 0; r < rows; r++)
                finish(m, t, row + r, first + p * PANEL, *(const floats *)(sums[p] + r * PANEL));
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

/* Multiply up to 32 rows with one or two panels. Tiles 0 to 3 hold the sums of (upper, lower) rows x two panels. Tiles
   4 and 5 hold rows of x, tiles 6 and 7 panels. is_first: prefetch the panels, which this step has not read yet. */
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
    finish_stores(x);
    for (int64_t row = 0; row < rows; row += 32) {
        int count = rows - row < 32 ? (int)(rows - row) : 32, upper = count < 16 ? count : 16, lower = count - upper;
        uint8_t up = (uint8_t)upper, low = (uint8_t)(lower ? lower : 1);
        if (count != shaped) shape_tiles((const uint8_t[8]){up, up, low, low, up, low, 16, 16}), shaped = count;
        for (int64_t panel = first; panel < end; panel += 2) {
            int panels = end - panel < 2 ? 1 : 2;
            /* The common case with constant arguments, so that its loop compiles without branches. */
            if (lower && panels == 2) tiles(m, x + row * stride, stride, t, row, upper, lower, panel, 2, row == 0);
            else tiles(m, x + row * stride, stride, t, row, upper, lower, panel, panels, row == 0);
        }
    }
    _tile_release();
}
#endif

/* Inputs to widen at a time. The widened inputs of a block of rows fit into the L1 cache together with the weights. */
#define INPUTS_PER_SLICE 512

/* Multiply `count` rows with all panels, `wide` panels at a time. */
#define MULTIPLY_BLOCKS(TYPE, X, STRIDE, SLICE)                                                                       \
    {                                                                                                                 \
        int64_t panel = first;                                                                                        \
        for (; panel + wide <= end; panel += wide)                                                                    \
            TYPE##_blocks[count](m, X, STRIDE, SLICE, t, row, panel, panel - first);                                  \
        for (; panel < end; panel++) TYPE##_single[count](m, X, STRIDE, SLICE, t, row, panel, panel - first);         \
    }

/* Of each type; NULL until a matrix of the type is made. */
static const PanelKernels *panel_kernels[NUM_TYPES];

void use_panel_kernels(int type, const PanelKernels *kernels) { panel_kernels[type] = kernels; }

/* Multiply all rows with the panels first .. end - 1. Rows of x are prepared, and `stride` entries of their type apart.
*/
static void multiply_quantised(const Matrix *m, const void *x, int64_t stride, int64_t rows, const Target *t,
                               int64_t first, int64_t end) {
    const int64_t row_bytes = stride * bytes_of(m->type), kind = rows_of_matrix(m);
    for (const QuantisedPart *part = m->parts; part < m->parts + m->num_parts; part++) {
        int64_t last = end < part->end_panel ? end : part->end_panel;
        for (int64_t panel = first > part->first_panel ? first : part->first_panel; panel < last; panel += 2) {
            int wide = panel + 2 <= last ? 2 : 1, at;
            for (int64_t row = 0; row < rows; row += kernel_sizes[kind][at].rows) {
                for (at = 3;; at--)                        /* the largest kernel that the rows and panels fill */
                    if (panel_kernels[part->type]->of[kind][at] && kernel_sizes[kind][at].rows <= rows - row
                        && kernel_sizes[kind][at].panels <= wide && kernel_sizes[kind][at].min_row <= row) break;
                const char *from = (const char *)x + row * row_bytes;
                for (int i = 0; i < wide; i += kernel_sizes[kind][at].panels)
                    panel_kernels[part->type]->of[kind][at](m, part, from, row_bytes, t, row, panel + i);
            }
        }
    }
}

/* Multiply all rows with the panels first .. end - 1, at most MAX_PANELS_PER_PIECE. x has the type of the matrix; for a
   quantised one, its rows are prepared. */
static void multiply(const Matrix *m, const void *x, int64_t stride, int64_t rows, const Target *t, int64_t first,
                     int64_t end) {
    if (m->parts) {
        multiply_quantised(m, x, stride, rows, t, first, end);
        return;
    }
#if defined(HAS_TILES)
    if (m->type == BFLOAT16 && (rows >= MIN_ROWS_FOR_TILES || m->is_uniform) && may_use_tiles()) {
        multiply_in_tiles(m, x, stride, rows, t, first, end);
        return;
    }
#endif
    float sums[MAX_ROWS * OUTPUTS_PER_PIECE] __attribute__((aligned(64)));
    for (int64_t row = 0; row < rows; row += MAX_ROWS) {
        int count = rows - row < MAX_ROWS ? (int)(rows - row) : MAX_ROWS, wide = panels_of_block(count);
        Slice whole = {0, m->inputs, 1, sums};
        if (m->type == FLOAT32) {
            const float *from = (const float *)x + row * stride;
            MULTIPLY_BLOCKS(f32, from, stride, &whole)
            continue;
        }
        const uint16_t *from = (const uint16_t *)x + row * stride;
#if defined(__AVX512BF16__)
        MULTIPLY_BLOCKS(bf16, from, stride, &whole)
#else
        float inputs[MAX_ROWS * INPUTS_PER_SLICE] __attribute__((aligned(64)));
        for (int64_t k = 0; k < m->inputs; k += INPUTS_PER_SLICE) {
            int64_t left = m->inputs - k;
            Slice slice = {k, left < INPUTS_PER_SLICE ? left : INPUTS_PER_SLICE, left <= INPUTS_PER_SLICE, sums};
            for (int r = 0; r < count; r++)
                for (int64_t i = 0; i < slice.count; i += LANES)
                    *(floats *)(inputs + r * INPUTS_PER_SLICE + i) = load(from + r * stride + k, i, BFLOAT16);
            MULTIPLY_BLOCKS(bf16, inputs, INPUTS_PER_SLICE, &slice)
        }
#endif
    }
}

/* Find the largest output of each row among the panels first .. end - 1, at most MAX_PANELS_PER_PIECE of them, and its
   index. Ties: the lowest index. The result is NaN if any output is NaN. The products stay in the cache. */
#define ROWS_OF_LARGEST 32

static void largest_outputs(const Matrix *m, const void *x, int64_t stride, int64_t rows, int64_t first, int64_t end,
                            float *largest_of, int64_t *index_of) {
    float products[ROWS_OF_LARGEST * MAX_PANELS_PER_PIECE * PANEL] __attribute__((aligned(64)));
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
                if (best[lane] > top || (best[lane] == top && where[lane] < index))
                    top = best[lane], index = where[lane];
                has_nan |= is_nan[lane];
            }
            largest_of[row + r] = has_nan ? NAN : top;
            index_of[row + r] = first * PANEL + index;
        }
    }
}

/* Pack the panels first .. end - 1 from a plain matrix [outputs, plain_inputs] with rows row_stride entries apart. */
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
