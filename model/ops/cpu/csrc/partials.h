// What rows of attention have summed over some of their cuts, and how two such sums become one.
//
// Knows neither queries nor keys. Weights are powers of 2 of the scores less `top`, the largest of them.
#pragma once
#include "attention_work.h"

struct Partial {
    float *o, *top, *total;  // [rows][padded d], [rows], [rows]
};

static inline size_t partial_floats(const Problem& p, int64_t rows) { return rows * (padded_head(p.d) + 2); }

static inline Partial partial_at(const Problem& p, int64_t rows, float* at) {
    float* top = at + rows * padded_head(p.d);
    return {at, top, top + rows};
}

static inline void merge(const Problem& p, int64_t rows, Partial into, Partial from) {
    int64_t width = padded_head(p.d);
    for (int64_t r = 0; r < rows; r++) {
        if (from.total[r] == 0.0f) continue;  // nothing visible in this cut
        float top = std::max(into.top[r], from.top[r]);
        vf keep = exp2_of<true>(splat(into.top[r] - top)), take = exp2_of<true>(splat(from.top[r] - top));
        into.top[r] = top;
        into.total[r] = madd(splat(from.total[r]), take, splat(into.total[r]) * keep)[0];
        for (int64_t i = r * width; i < (r + 1) * width; i += LANES)
            store(into.o + i, madd(load<vf>(from.o + i), take, load<vf>(into.o + i) * keep));
    }
}

static inline void clear(const Problem& p, int64_t rows, Partial state) {
    std::fill_n(state.o, rows * padded_head(p.d), 0.0f);
    std::fill_n(state.top, rows, -__builtin_inff());
    std::fill_n(state.total, rows, 0.0f);
}
