/* AMX tiles in C, as Intel's manual describes their instructions, for machines without them. Included before step.c. */
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define __AMX_BF16__ 1
#define syscall(...) 0                /* the permission to use tiles */

static __thread struct {
    uint8_t rows[8], data[8][16][64] __attribute__((aligned(64)));
} tile_registers;

static void load_tile(int tile, const void *from, int64_t stride) {
    for (int row = 0; row < tile_registers.rows[tile]; row++)
        memcpy(tile_registers.data[tile][row], (const char *)from + row * stride, 64);
}

static void store_tile(int tile, void *to, int64_t stride) {
    for (int row = 0; row < tile_registers.rows[tile]; row++)
        memcpy((char *)to + row * stride, tile_registers.data[tile][row], 64);
}

static float as_number(uint16_t upper) {
    uint32_t bits = (uint32_t)upper << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

/* TDPBF16PS */
static void multiply_tiles(int to, int first, int second) {
    for (int m = 0; m < tile_registers.rows[to]; m++) {
        float sums[2][16] = {}, *total = (float *)tile_registers.data[to][m];
        const uint16_t *a = (const uint16_t *)tile_registers.data[first][m];
        for (int k = 0; k < tile_registers.rows[second]; k++) {
            const uint16_t *b = (const uint16_t *)tile_registers.data[second][k];
            for (int n = 0; n < 16; n++)
                for (int half = 0; half < 2; half++)
                    sums[half][n] = fmaf(as_number(a[2 * k + half]), as_number(b[2 * n + half]), sums[half][n]);
        }
        for (int n = 0; n < 16; n++) total[n] += sums[0][n] + sums[1][n];
    }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#define _tile_loadconfig(SHAPES) memcpy(tile_registers.rows, (const char *)(SHAPES) + 48, 8)
#define _tile_release() memset(&tile_registers, 0xff, sizeof tile_registers)
#define _tile_loadd(TILE, FROM, STRIDE) load_tile(TILE, FROM, STRIDE)
#define _tile_stored(TILE, TO, STRIDE) store_tile(TILE, TO, STRIDE)
#define _tile_zero(TILE) memset(tile_registers.data[TILE], 0, sizeof tile_registers.data[TILE])
#define _tile_dpbf16ps(TO, FIRST, SECOND) multiply_tiles(TO, FIRST, SECOND)
