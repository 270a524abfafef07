// The one matrix kernel: a tile of rows of x against panels of weights. Linear layers and attention are built from it.
//
// Knows no threads and no layers. Every output element owns one accumulator lane that runs through k in ascending
// order from zero: its bits do not depend on the height of the tile, on the number of panels, or on who computes.
//
// A panel is PANEL columns (rows of W), contiguous over all of k. In a float panel, step k holds PANEL floats; in a bf16
// panel it holds LANES words of 32 bits, column i in the low half of word i, column LANES + i in the high half:
// one load, a shift and a mask give two vectors of floats.
#pragma once
#include "vec.h"

constexpr int PANEL = 2 * LANES;
constexpr int AHEAD = 4096;  // bytes: how far ahead of its use a weight that comes from memory is asked for
constexpr int MAX_ROWS = REGISTERS == 32 ? 12 : 6;  // 2 accumulators a row, two weight vectors, one broadcast

// How many panels a tile takes at once: enough accumulators to hide the latency of the multiply-add.
constexpr int panels_for(int rows) {
    int pairs = MAX_ROWS / rows;
    return pairs > 4 ? 4 : pairs;
}

static inline void load_step(const float* panel, int k, vf& lo, vf& hi) {
    lo = load<vf>(panel + size_t(k) * PANEL);
    hi = load<vf>(panel + size_t(k) * PANEL + LANES);
}

static inline void load_step(const bf16* panel, int k, vf& lo, vf& hi) {
    vu both = load<vu>(panel + size_t(k) * PANEL);
    lo = (vf)(both << 16);
    hi = (vf)(both & 0xffff0000u);
}

// c[r][p * PANEL + j] = sum over k of x[r * ROW_STEP + k * K_STEP] * panel p's (k, j). FAR: the panels lie in memory.
template <int ROWS, int PANELS, class W, bool FAR, int ROW_STEP, int K_STEP>
__attribute__((noinline)) static void tile(const float* x, const W* w, size_t panel_stride, int k_len, float* c,
                                           size_t c_stride) {
    vf acc[ROWS][PANELS][2] = {};
    for (int k = 0; k < k_len; k++) {
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            vf lo, hi;
            if (FAR) __builtin_prefetch(w + p * panel_stride + size_t(k) * PANEL + AHEAD / sizeof(W), 0, 3);
            load_step(w + p * panel_stride, k, lo, hi);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                vf value = splat(x[size_t(k) * K_STEP + r * ROW_STEP]);
                acc[r][p][0] = madd(lo, value, acc[r][p][0]);
                acc[r][p][1] = madd(hi, value, acc[r][p][1]);
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

// All panels of one tile of rows, several at a time.
template <int ROWS, class W, bool FAR, int ROW_STEP, int K_STEP>
static void tile_panels(const float* x, const W* w, size_t panel_stride, int panels, int k_len, float* c,
                        size_t c_stride) {
    constexpr int AT_ONCE = panels_for(ROWS);
    int p = 0;
    for (; p + AT_ONCE <= panels; p += AT_ONCE)
        tile<ROWS, AT_ONCE, W, FAR, ROW_STEP, K_STEP>(x, w + p * panel_stride, panel_stride, k_len, c + p * PANEL, c_stride);
    for (; p < panels; p++)
        tile<ROWS, 1, W, FAR, ROW_STEP, K_STEP>(x, w + p * panel_stride, panel_stride, k_len, c + p * PANEL, c_stride);
}

// ---- choosing the height at run time -------------------------------------------------------------------------------
template <class W>
using TileFn = void (*)(const float*, const W*, size_t, int, int, float*, size_t);

// x interleaved: [k][rows].
template <class W, bool FAR, int ROWS = MAX_ROWS>
static TileFn<W> interleaved_tile(int rows) {
    if (rows == ROWS) return tile_panels<ROWS, W, FAR, 1, ROWS>;
    if constexpr (ROWS > 1) return interleaved_tile<W, FAR, ROWS - 1>(rows);
    return nullptr;
}

// x by rows, ROW_STEP floats apart.
template <class W, int ROW_STEP, int ROWS = MAX_ROWS>
static TileFn<W> strided_tile(int rows) {
    if (rows == ROWS) return tile_panels<ROWS, W, false, ROW_STEP, 1>;
    if constexpr (ROWS > 1) return strided_tile<W, ROW_STEP, ROWS - 1>(rows);
    return nullptr;
}

// Rows are cut into ceil(m / MAX_ROWS) tiles of nearly equal height; tile t starts at row tile_start(m, t).
static inline int tile_count(int m) { return (m + MAX_ROWS - 1) / MAX_ROWS; }
static inline int tile_start(int m, int t) { return int(int64_t(m) * t / tile_count(m)); }
