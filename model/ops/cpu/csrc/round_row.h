// Activations rounded to 8 bits, one scale per row. Knows no layers.
#pragma once
#include "vec.h"
#include "workspace.h"

typedef int8_t few_bytes __attribute__((vector_size(LANES)));

struct Rounding {
    float scale;  // NaN for a row that is not finite
    int32_t sum;  // of the rounded values
};

static inline int8_t* rounded_rows(int rows, size_t row_bytes) {
    static thread_local Workspace space;
    return space.get<int8_t>(rows * row_bytes + LANES);
}

// Rounds to -127 .. 127; out is filled with zeros up to a multiple of 4, and may be overwritten up to one of LANES.
template <class X>
static Rounding round_row(const X* x, int k_len, int8_t* out) {
    vf most{}, check{};
    for (int k = 0; k < k_len; k += LANES) {
        vf value = load_at(x, k, k_len), size = (vf)((vu)value & 0x7fffffffu);
        most = size > most ? size : most;
        check += value - value;
    }
    float top = largest(most), inverse = top > 0.0f ? 127.0f / top : 0.0f;
    vu total{};
    for (int k = 0; k < k_len; k += LANES) {
        vi rounded = (vi)((vu)(load_at(x, k, k_len) * inverse + 12582912.0f) - 0x4b400000u);  // 1.5 * 2^23
        total += (vu)rounded;
        store(out + k, __builtin_convertvector(rounded, few_bytes));
    }
    uint32_t lanes[LANES], whole = 0;
    store(lanes, total);
    for (uint32_t lane : lanes) whole += lane;
    return {top / 127.0f + sum(check), int32_t(whole)};
}
