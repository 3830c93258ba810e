/* AMX tiles: eight registers of 16 rows of 64 bytes. */
#pragma once
#include "vectors.h"

#define TILE_ROWS 16

#if defined(__AMX_BF16__) && defined(__AVX512BF16__)
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>
#define HAS_TILES 1

/* Whether this process may use AMX tiles. Requests the permission from the kernel, which the threads and forked children
   of the process share. The first answer is kept: it divides products into pieces, so it must not change within a job. */
static int may_use_tiles(void) {
    static _Atomic int answer = -1;
    int known = atomic_load_explicit(&answer, memory_order_relaxed);
    if (known >= 0) return known;
    int found = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return atomic_compare_exchange_strong(&answer, &known, found) ? found : known;
}

/* Write to memory what was computed so far: GCC's intrinsics do not say that they read memory (GCC bug 114098). */
INLINE void finish_stores(const void *memory) { __asm__ volatile("" : : "r"(memory) : "memory"); }

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((packed)) TileShapes;

static void shape_tiles(const uint8_t rows[8]) {
    TileShapes shapes = {.palette = 1};
    for (int i = 0; i < 8; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = rows[i];
    finish_stores(&shapes);
    _tile_loadconfig(&shapes);
}
#else
INLINE int may_use_tiles(void) { return 0; }
#endif
