/* Rowwise operations: norms, activations, rotation. Computed in float32. */
#pragma once
#include "vectors.h"

enum { SILU = 0, GELU = 1, GELU_NEW = 2, RELU = 3 };

/* y = x / sqrt(mean(x^2) + epsilon) * (weight + offset). All [size]; y can be x. */
INLINE void rms_norm_of(const void *x, void *y, const float *weight, int64_t size, float epsilon, float offset,
                        int type) {
    floats squares = all(0);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        floats v = load(x, i, type);
        squares += v * v;
    }
    float total = sum(squares);
    for (; i < size; i++) total += load_one(x, i, type) * load_one(x, i, type);
    float scale = 1.0f / sqrtf(total / (float)size + epsilon);
    for (i = 0; i + LANES <= size; i += LANES)
        store(y, i, load(x, i, type) * scale * (*(const floats *)(weight + i) + offset), type);
    for (; i < size; i++) store_one(y, i, load_one(x, i, type) * scale * (weight[i] + offset), type);
}

/* y = (x - mean) / sqrt(variance + epsilon) * weight + bias. */
INLINE void layer_norm_of(const void *x, void *y, const float *weight, const float *bias, int64_t size, float epsilon,
                          int type) {
    floats sums = all(0);
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) sums += load(x, i, type);
    float total = sum(sums);
    for (; i < size; i++) total += load_one(x, i, type);
    float mean = total / (float)size;
    floats squares = all(0);
    for (i = 0; i + LANES <= size; i += LANES) {
        floats v = load(x, i, type) - mean;
        squares += v * v;
    }
    total = sum(squares);
    for (; i < size; i++) {
        float v = load_one(x, i, type) - mean;
        total += v * v;
    }
    float scale = 1.0f / sqrtf(total / (float)size + epsilon);
    for (i = 0; i + LANES <= size; i += LANES)
        store(y, i, (load(x, i, type) - mean) * scale * *(const floats *)(weight + i) + *(const floats *)(bias + i),
              type);
    for (; i < size; i++) store_one(y, i, (load_one(x, i, type) - mean) * scale * weight[i] + bias[i], type);
}

/* The error function by Abramowitz and Stegun 7.1.26; maximum error 1.5e-7. */
INLINE floats error_function(floats z) {
    floats size = larger(z, -z);
    floats t = 1.0f / (1.0f + 0.3275911f * size);
    floats p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
    floats result = 1.0f - p * exponential(-size * size);
    integers is_negative = z < 0.0f;
    return (floats)(((integers)-result & is_negative) | ((integers)result & ~is_negative)) + (z - z);
}

INLINE floats activated(floats x, int kind) {
    switch (kind) {
    case SILU: return x / (1.0f + exponential(-x));
    case GELU: return 0.5f * x * (1.0f + error_function(x * 0.70710678118f));
    case GELU_NEW: return 0.5f * x * (1.0f + hyperbolic_tangent(0.79788456080f * (x + 0.044715f * x * x * x)));
    default: return larger(x, all(0)) + (x - x);
    }
}

/* y[i] = f(x[i]) * x[size + i] if gated, else f(x[i]). */
INLINE void activate_row(const void *x, void *y, int64_t size, int kind, int is_gated, int type) {
    for (int64_t i = 0; i < size; i += LANES) {
        int64_t left = size - i;
        if (left >= LANES) {
            floats v = activated(load(x, i, type), kind);
            if (is_gated) v *= load(x, size + i, type);
            store(y, i, v, type);
            continue;
        }
        floats v = all(0), up = all(1);
        for (int64_t j = 0; j < left; j++) {
            v[j] = load_one(x, i + j, type);
            if (is_gated) up[j] = load_one(x, size + i + j, type);
        }
        v = activated(v, kind) * up;
        for (int64_t j = 0; j < left; j++) store_one(y, i + j, v[j], type);
    }
}

/* y = x, with entries above the bound or below minus the bound replaced by it; NaN stays NaN. */
INLINE void clamp_row(const void *x, void *y, int64_t size, float bound, int type) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) {
        floats v = load(x, i, type);
        integers is_above = v > bound, is_below = v < -bound, is_within = ~(is_above | is_below);
        store(y, i, (floats)(((integers)v & is_within) | ((integers)all(bound) & is_above)
                             | ((integers)all(-bound) & is_below)), type);
    }
    for (; i < size; i++) {
        float v = load_one(x, i, type);
        store_one(y, i, v > bound ? bound : v < -bound ? -bound : v, type);
    }
}

/* y = x * factor */
INLINE void scale_row(const void *x, void *y, int64_t size, float factor, int type) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) store(y, i, load(x, i, type) * factor, type);
    for (; i < size; i++) store_one(y, i, load_one(x, i, type) * factor, type);
}

/* Rotate the first 2 * half entries of a head: (a, b) -> (a cos - b sin, b cos + a sin), with a = x[i] and
   b = x[half + i]. Copy the others. y can be x. */
INLINE void rotate(const void *x, void *y, const float *cosines, const float *sines, int64_t half, int64_t size,
                   int type) {
    int64_t i = 0;
    for (; i + LANES <= half; i += LANES) {
        floats a = load(x, i, type), b = load(x, half + i, type);
        floats c = *(const floats *)(cosines + i), s = *(const floats *)(sines + i);
        store(y, i, a * c - b * s, type);
        store(y, half + i, b * c + a * s, type);
    }
    for (; i < half; i++) {
        float a = load_one(x, i, type), b = load_one(x, half + i, type);
        store_one(y, i, a * cosines[i] - b * sines[i], type);
        store_one(y, half + i, b * cosines[i] + a * sines[i], type);
    }
    if (y != x) memcpy((char *)y + 2 * half * bytes_of(type), (const char *)x + 2 * half * bytes_of(type),
                       (size - 2 * half) * bytes_of(type));
}
