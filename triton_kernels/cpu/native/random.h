/* Philox-4x32-10, as in philox.py, which names the source: random words from a key and a counter. */
#pragma once
#include <stdint.h>

/* Write the four words of each counter (position of the row, purpose, quarter, 0), with the seed of the row as key.

   seeds [rows], positions [rows], purposes [counters], words [rows][4][counters]
   quarters   [rows][counters], or [counters] for the same numbers in all rows, with quarter_stride 0 */
static inline void random_words(const uint64_t *seeds, const int32_t *positions, const uint32_t *purposes,
                                const uint32_t *quarters, int64_t quarter_stride, int64_t rows, int64_t counters,
                                uint32_t *words) {
    for (int64_t row = 0; row < rows; row++) {
        const uint32_t *quarter = quarters + row * quarter_stride;
        uint32_t *out = words + row * 4 * counters;
        for (int64_t i = 0; i < counters; i++) {
            uint32_t key_0 = (uint32_t)seeds[row], key_1 = (uint32_t)(seeds[row] >> 32);
            uint32_t word_0 = (uint32_t)positions[row], word_1 = purposes[i], word_2 = quarter[i], word_3 = 0;
            for (int round = 0; round < 10; round++) {
                uint64_t product_0 = (uint64_t)word_0 * 0xD2511F53u, product_1 = (uint64_t)word_2 * 0xCD9E8D57u;
                word_0 = (uint32_t)(product_1 >> 32) ^ word_1 ^ key_0;
                word_1 = (uint32_t)product_1;
                word_2 = (uint32_t)(product_0 >> 32) ^ word_3 ^ key_1;
                word_3 = (uint32_t)product_0;
                key_0 += 0x9E3779B9u, key_1 += 0xBB67AE85u;
            }
            out[i] = word_0, out[counters + i] = word_1, out[2 * counters + i] = word_2, out[3 * counters + i] = word_3;
        }
    }
}
