/* y = x W^T (+ b) (+ y): rows of x times a packed matrix.

   Packed: panels of 16 outputs. In bfloat16 a panel is [inputs / 2][16][2], so that one load has two inputs of each of
   16 outputs, which is what a vdpbf16ps and a tile of AMX take alike; inputs are padded with zeros to a multiple of 32.
   In float32 it is [inputs][16]. Rows of x may be read up to that multiple: what lies there must be finite. */
#pragma once
#include "vectors.h"

#define PANEL 16
#define INPUTS_ALIGNED 32

typedef struct {
    int64_t inputs, outputs;          /* inputs: padded */
    const void *panels;
    const float *bias;                /* NULL: none */
    int type;
} Matrix;

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
            for (int r = 0; r < R; r++) {                                                                             \
                uint32_t two;                                                                                         \
                memcpy(&two, x + r * stride + 2 * k, 4);                                                              \
                for (int p = 0; p < P; p++) sums[r][p] = add_pairs(sums[r][p], two, v[p]);                            \
            }                                                                                                         \
        }                                                                                                             \
        for (int r = 0; r < R; r++)                                                                                   \
            for (int p = 0; p < P; p++) finish(m, t, row + r, panel + p, sums[r][p]);                                 \
    }

#if defined(__AVX512BF16__)
INLINE floats add_pairs(floats sums, uint32_t two, words pairs) {
    return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32((int)two), (__m512bh)pairs);
}
#else
INLINE floats add_pairs(floats sums, uint32_t two, words pairs) {
    uint32_t low = two << 16, high = two & 0xffff0000;
    float a, b;
    memcpy(&a, &low, 4);
    memcpy(&b, &high, 4);
    return sums + (floats)(pairs << 16) * a + (floats)(pairs & 0xffff0000) * b;
}
#endif

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

#if defined(__AMX_BF16__)
#include <sys/syscall.h>
#include <unistd.h>
#define FEWEST_ROWS_OF_TILES 2

/* Whether this process may use the tiles: the system wants to be asked once. */
static int may_use_tiles(void) {
    static int answer = -1;
    if (answer < 0) answer = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return answer;
}

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) TileShapes;

static void shape_tiles(int upper, int lower) {
    /* 0..3: sums of (upper, lower) x two panels; 4, 5: rows of x; 6, 7: panels */
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64;
    shapes.rows[0] = shapes.rows[1] = shapes.rows[4] = upper;
    shapes.rows[2] = shapes.rows[3] = shapes.rows[5] = lower ? lower : 1;
    shapes.rows[6] = shapes.rows[7] = 16;
    _tile_loadconfig(&shapes);
}

static void finish_tile(const Matrix *m, const Target *t, int64_t row, int rows, int64_t panel, const float *sums) {
    for (int r = 0; r < rows; r++) finish(m, t, row + r, panel, *(const floats *)(sums + r * PANEL));
}

/* Up to 32 rows times one or two panels. */
static void tiles(const Matrix *m, const uint16_t *x, int64_t stride, const Target *t, int64_t row, int upper,
                  int lower, int64_t panel, int panels) {
    const char *first = (const char *)m->panels + panel * panel_bytes(m), *second = first + panel_bytes(m);
    float sums[16 * PANEL] __attribute__((aligned(64)));
    int64_t pitch = stride * 2;
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t k = 0; k < m->inputs; k += 32) {
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
    _tile_stored(0, sums, 64); finish_tile(m, t, row, upper, panel, sums);
    if (panels > 1) { _tile_stored(1, sums, 64); finish_tile(m, t, row, upper, panel + 1, sums); }
    if (lower) {
        _tile_stored(2, sums, 64); finish_tile(m, t, row + 16, lower, panel, sums);
        if (panels > 1) { _tile_stored(3, sums, 64); finish_tile(m, t, row + 16, lower, panel + 1, sums); }
    }
}

static void multiply_in_tiles(const Matrix *m, const uint16_t *x, int64_t stride, int64_t rows, const Target *t,
                              int64_t first, int64_t end) {
    int shaped = -1;
    for (int64_t row = 0; row < rows; row += 32) {
        int count = rows - row < 32 ? (int)(rows - row) : 32, upper = count < 16 ? count : 16, lower = count - upper;
        if (count != shaped) shape_tiles(upper, lower), shaped = count;
        for (int64_t panel = first; panel < end; panel += 2)
            tiles(m, x + row * stride, stride, t, row, upper, lower, panel, end - panel < 2 ? 1 : 2);
    }
    _tile_release();
}
#endif

/* All rows times the panels first .. end - 1. x has the matrix's type. */
static void multiply(const Matrix *m, const void *x, int64_t stride, int64_t rows, const Target *t, int64_t first,
                     int64_t end) {
#if defined(__AMX_BF16__)
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
