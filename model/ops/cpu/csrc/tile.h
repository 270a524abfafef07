// The one matrix kernel: a tile of rows of x against panels of weights. Linear layers and attention are built from it.
//
// Knows no threads, no layers and no kind of number: a Kind (kinds.h) says how a word of weights is read and multiplied.
// Every output element owns one accumulator lane that runs through k in ascending order from zero: its bits do not
// depend on the height of the tile, on the number of panels, or on who computes.
//
// A panel is PANEL columns (rows of W), contiguous over all of k. A step of it is one word of 32 bits for each column:
// one float, a pair of bf16, four 8-bit or eight 4-bit weights of that column, k ascending from the low end. x holds
// Kind::PARTS words for each step and row.
#pragma once
#include "kinds.h"

constexpr int PANEL = 2 * LANES;
constexpr size_t STEP_BYTES = PANEL * sizeof(uint32_t);
constexpr int MAX_ROWS = REGISTERS == 32 ? 12 : 6;  // 2 accumulators a row, two weight vectors, one broadcast

// What to ask memory for while a tile computes, `stride` bytes a step: a line that is needed soon is asked into the first
// cache, which takes few at a time, one that is needed later into the second. From step `turn` on, `jump` bytes further.
struct Ahead {
    const uint8_t *soon, *later;
    size_t stride;
    int turn;
    size_t jump;

    void skip(size_t bytes) {  // what lies between the steps of a panel
        soon += bytes * stride / STEP_BYTES, later += bytes * stride / STEP_BYTES;
    }
};

template <int PANELS>
static inline void ask(Ahead& ahead, int step, size_t panel_bytes) {
    if (PANELS > 1 && step == ahead.turn) ahead.later += ahead.jump;
#pragma GCC unroll 4
    for (int p = 0; p < PANELS; p++)
        for (size_t line = 0; line < STEP_BYTES; line += 64) {
            size_t at = step * ahead.stride + p * panel_bytes + line;
            if (PANELS == 1) __builtin_prefetch(ahead.soon + at, 0, 3);
            __builtin_prefetch(ahead.later + at, 0, 2);
        }
}

// c[r][p * PANEL + j] = sum over k of x[step * X_STEP + part * X_PART + r * X_ROW] times panel p's (step, part, j).
// FAR: the panels come from memory.
template <class Kind, int ROWS, int PANELS, bool FAR, int X_ROW, int X_PART>
__attribute__((noinline)) static void tile(const typename Kind::Word* x, const uint8_t* w, size_t panel_bytes, int steps,
                                           Ahead ahead, typename Kind::Sum* c, size_t c_stride) {
    typename Kind::Sums acc[ROWS][PANELS][2] = {};
    for (int step = 0; step < steps; step++) {
        if (FAR) ask<PANELS>(ahead, step, panel_bytes);
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
#pragma GCC unroll 2
            for (int part = 0; part < Kind::PARTS; part++) {
                const uint8_t* at = fresh(w + p * panel_bytes + size_t(step) * STEP_BYTES);
                const auto* values = fresh(x + size_t(step * Kind::PARTS + part) * X_PART);
                auto lo = Kind::weights(at, part), hi = Kind::weights(at + VEC_BYTES, part);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; r++) {
                    auto value = Kind::spread(values[r * X_ROW]);
                    acc[r][p][0] = Kind::dot(lo, value, acc[r][p][0]);
                    acc[r][p][1] = Kind::dot(hi, value, acc[r][p][1]);
                }
            }
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            store(c + r * c_stride + p * PANEL, acc[r][p][0]);
            store(c + r * c_stride + p * PANEL + LANES, acc[r][p][1]);
        }
}

// How many panels a tile takes at once: enough accumulators to hide the latency of the multiply-add.
constexpr int panels_for(int rows, int most) { return MAX_ROWS / rows > most ? most : MAX_ROWS / rows; }
constexpr int streams_for(int rows) { return rows > 4 ? 1 : 4 / rows; }  // panels at once that come from memory

// ---- choosing the height at run time -------------------------------------------------------------------------------
template <class Kind>
using TileFn = void (*)(const typename Kind::Word*, const uint8_t*, size_t, int, Ahead, typename Kind::Sum*, size_t);

// x interleaved: [step][part][rows]; panels: 1 or streams_for(rows).
template <class Kind, int ROWS = MAX_ROWS>
static TileFn<Kind> far_tile(int rows, int panels) {
    constexpr int TOGETHER = streams_for(ROWS);
    if (rows == ROWS) return panels == 1 ? tile<Kind, ROWS, 1, true, 1, ROWS> : tile<Kind, ROWS, TOGETHER, true, 1, ROWS>;
    if constexpr (ROWS > 1) return far_tile<Kind, ROWS - 1>(rows, panels);
    return nullptr;
}

// Factors that are in the cache already: all panels of a tile, several at a time.
template <class Kind, int ROWS, int X_ROW, int X_STEP, int AT_ONCE = panels_for(ROWS, 4)>
static void tile_panels(const typename Kind::Word* x, const typename Kind::Word* w, size_t panel_words, int panels,
                        int steps, float* c, size_t c_stride) {
    for (; panels >= AT_ONCE; panels -= AT_ONCE, w += AT_ONCE * panel_words, c += AT_ONCE * PANEL)
        tile<Kind, ROWS, AT_ONCE, false, X_ROW, X_STEP>(x, reinterpret_cast<const uint8_t*>(w), panel_words * 4, steps, {}, c,
                                                        c_stride);
    if constexpr (AT_ONCE > 1)
        tile_panels<Kind, ROWS, X_ROW, X_STEP, AT_ONCE / 2>(x, w, panel_words, panels, steps, c, c_stride);
}

template <class Kind>
using NearFn = void (*)(const typename Kind::Word*, const typename Kind::Word*, size_t, int, int, float*, size_t);

// x interleaved: [step][rows].
template <class Kind, int ROWS = MAX_ROWS>
static NearFn<Kind> interleaved_tile(int rows) {
    if (rows == ROWS) return tile_panels<Kind, ROWS, 1, ROWS>;
    if constexpr (ROWS > 1) return interleaved_tile<Kind, ROWS - 1>(rows);
    return nullptr;
}

// x by rows, X_ROW words apart.
template <class Kind, int X_ROW, int ROWS = MAX_ROWS>
static NearFn<Kind> strided_tile(int rows) {
    if (rows == ROWS) return tile_panels<Kind, ROWS, X_ROW, 1>;
    if constexpr (ROWS > 1) return strided_tile<Kind, X_ROW, ROWS - 1>(rows);
    return nullptr;
}

// Rows are cut into ceil(m / most) tiles of nearly equal height; tile t starts at row tile_start(m, t).
static inline int tile_count(int m, int most = MAX_ROWS) { return (m + most - 1) / most; }
static inline int tile_start(int m, int t, int most = MAX_ROWS) { return int(int64_t(m) * t / tile_count(m, most)); }
