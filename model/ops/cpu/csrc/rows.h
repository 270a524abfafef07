// Operations on one row of floats, shared by the layer operations. Knows no threads.
#pragma once
#include "vec.h"

// out = weight * (x / rms(x)), the quotient rounded to T first; the mean square in fp32. n elements.
template <class T>
static inline void rms_norm_row(const T* x, const T* weight, float eps, int n, T* out) {
    vf squares{};
    for (int i = 0; i < n; i += LANES) {
        vf value = load_at(x, i, n);
        squares = madd(value, value, squares);
    }
    float inverse = 1.0f / __builtin_sqrtf(sum(squares) / float(n) + eps);
    for (int i = 0; i < n; i += LANES)
        store_at(out, i, n, load_at(weight, i, n) * rounded_to(load_at(x, i, n) * inverse, x));
}

// Turns pairs (i, i + half) of x by the angles whose cosines and sines are given; half elements each.
template <class T>
static inline void rotate_row(const T* x, const float* cosine, const float* sine, int half, T* out) {
    for (int i = 0; i < half; i += LANES) {
        vf a = load_at(x, i, half), b = load_at(x + half, i, half);
        vf c = load_at(cosine, i, half), s = load_at(sine, i, half);
        store_at(out, i, half, a * c - b * s);
        store_at(out + half, i, half, b * c + a * s);
    }
}
