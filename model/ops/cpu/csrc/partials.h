// What rows of attention have summed over some of their cuts, and how two such sums become one.
//
// Knows neither queries nor keys. Weights are powers of 2 of the scores less `top`, the largest of them.
#pragma once
#include "attention_work.h"

struct Partial {
    float *o, *top, *total;  // [rows][padded d], [rows], [rows]; a vector may be read from any row on
};

static inline size_t partial_floats(const Problem& p, int64_t rows) { return rows * padded_head(p.d) + 2 * (rows + LANES); }

static inline Partial partial_at(const Problem& p, int64_t rows, float* at) {
    float* top = at + rows * padded_head(p.d);
    return {at, top, top + rows + LANES};
}

static inline Partial rows_from(const Problem& p, int64_t row, Partial of) {
    return {of.o + row * padded_head(p.d), of.top + row, of.total + row};
}

// Of up to LANES rows.
__attribute__((noinline)) static void merge_some(const Problem& p, int rows, Partial into, Partial from) {
    vf before = load<vf>(into.top), here = load<vf>(from.top), added = load<vf>(from.total);
    vf top = before < here ? here : before, keep = exp2_of<true>(before - top), take = exp2_of<true>(here - top);
    vf total = madd(added, take, load<vf>(into.total) * keep);
    int64_t width = padded_head(p.d);
    for (int r = 0; r < rows; r++) {
        if (added[r] == 0.0f) continue;  // nothing visible in this cut
        into.top[r] = top[r], into.total[r] = total[r];
        vf keep_row = splat(keep[r]), take_row = splat(take[r]);
        for (int64_t i = r * width; i < (r + 1) * width; i += LANES)
            store(into.o + i, madd(load<vf>(from.o + i), take_row, load<vf>(into.o + i) * keep_row));
    }
}

static inline void merge(const Problem& p, int64_t rows, Partial into, Partial from) {
    for (int64_t r = 0; r < rows; r += LANES)
        merge_some(p, int(std::min<int64_t>(LANES, rows - r)), rows_from(p, r, into), rows_from(p, r, from));
}

static inline void clear(const Problem& p, int64_t rows, Partial state) {
    std::fill_n(state.o, rows * padded_head(p.d), 0.0f);
    std::fill_n(state.top, rows, -__builtin_inff());
    std::fill_n(state.total, rows, 0.0f);
}
