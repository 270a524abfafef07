// Linear layers: y = x W^T + b, weights in panels, fp32 sums, any number of rows.
//
// Knows nothing of what a layer means. See tile.h for the order of the sums.
#include <omp.h>

#include "tile.h"
#include "workspace.h"

namespace {

constexpr size_t BLOCK_BYTES = 192 << 10;  // of packed x: stays in the second-level cache beside one panel

template <class W>
void put(W* panel, int column, W value);

template <>
void put(float* step, int column, float value) {
    step[column] = value;
}

template <>
void put(bf16* step, int column, bf16 value) {
    step[column < LANES ? 2 * column : 2 * (column - LANES) + 1] = value;
}

template <class W>
void pack_weights(const W* w, int64_t n, int64_t k, W* packed) {
    int64_t panels = (n + PANEL - 1) / PANEL;
#pragma omp parallel for schedule(static)
    for (int64_t p = 0; p < panels; p++)
        for (int64_t i = 0; i < k; i++)
            for (int j = 0; j < PANEL; j++) {
                int64_t row = p * PANEL + j;
                put(packed + (p * k + i) * PANEL, j, row < n ? w[row * k + i] : W{});
            }
}

// Rows [first, first + rows) of x as floats, interleaved: [k][rows].
template <class X>
void interleave(const X* x, int64_t k_len, int rows, float* out) {
    for (int r = 0; r < rows; r++)
        for (int64_t k = 0; k < k_len; k++) out[k * rows + r] = widen(x[r * k_len + k]);
}

struct Shape {
    int64_t m, n, k;
};

template <class Y>
void finish(const float* c, int rows, int columns, const float* bias, Y* y, int64_t y_stride, size_t c_stride) {
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j += LANES) {
            vf value = load<vf>(c + r * c_stride + j);
            if (bias) value += load_at(bias, j, columns);
            store_at(y + r * y_stride, j, columns, value);
        }
}

// One block of rows, packed by the thread that computes with it, against panels [first, last).
template <class X, class W, class Y>
void block(const X* x, const W* w, const float* bias, Y* y, Shape s, int m, int first, int last) {
    constexpr int GROUP = 4;  // panels per visit of a tile
    static thread_local Workspace space;
    float* packed = space.get<float>(size_t(m) * s.k);
    alignas(64) float c[MAX_ROWS * GROUP * PANEL];
    for (int t = 0; t < tile_count(m); t++)
        interleave(x + tile_start(m, t) * s.k, s.k, tile_start(m, t + 1) - tile_start(m, t),
                   packed + tile_start(m, t) * s.k);
    for (int p = first; p < last; p += GROUP) {
        int panels = last - p < GROUP ? last - p : GROUP;
        int64_t column = int64_t(p) * PANEL;
        int columns = int(s.n - column < panels * PANEL ? s.n - column : panels * PANEL);
        for (int t = 0; t < tile_count(m); t++) {
            int start = tile_start(m, t), rows = tile_start(m, t + 1) - start;
            interleaved_tile<W, true>(rows)(packed + start * s.k, w + column * s.k, s.k * PANEL, panels, int(s.k), c,
                                      GROUP * PANEL);
            finish(c, rows, columns, bias ? bias + column : nullptr, y + start * s.n + column, s.n, GROUP * PANEL);
        }
    }
}

template <class X, class W, class Y>
void linear(const X* x, const W* w, const float* bias, Y* y, Shape s) {
    int panels = int((s.n + PANEL - 1) / PANEL);
    int64_t fitting = BLOCK_BYTES / (s.k * sizeof(float)) / MAX_ROWS * MAX_ROWS;
    int64_t step = fitting > 2 * MAX_ROWS ? fitting : 2 * MAX_ROWS;
#pragma omp parallel if (s.m * s.n * s.k > 1 << 15)
    {
        int threads = omp_get_num_threads(), me = omp_get_thread_num();
        int first = panels * me / threads, last = panels * (me + 1) / threads;
        for (int64_t m = 0; m < s.m && first < last; m += step)
            block(x + m * s.k, w, bias, y + m * s.n, s, int(s.m - m < step ? s.m - m : step), first, last);
    }
}

template <class X, class W>
void linear_to(const X* x, const W* w, const float* bias, void* y, int y_bf16, Shape s) {
    if (y_bf16)
        linear(x, w, bias, static_cast<bf16*>(y), s);
    else
        linear(x, w, bias, static_cast<float*>(y), s);
}

template <class X>
void linear_with(const X* x, const void* w, int w_bf16, const float* bias, void* y, int y_bf16, Shape s) {
    if (w_bf16)
        linear_to(x, static_cast<const bf16*>(w), bias, y, y_bf16, s);
    else
        linear_to(x, static_cast<const float*>(w), bias, y, y_bf16, s);
}

}  // namespace

extern "C" {

int rw_panel() { return PANEL; }

void rw_pack_linear(const void* w, int w_bf16, int64_t n, int64_t k, void* packed) {
    if (w_bf16)
        pack_weights(static_cast<const bf16*>(w), n, k, static_cast<bf16*>(packed));
    else
        pack_weights(static_cast<const float*>(w), n, k, static_cast<float*>(packed));
}

void rw_linear(const void* x, int x_bf16, const void* w, int w_bf16, const float* bias, void* y, int y_bf16, int64_t m,
               int64_t n, int64_t k) {
    Shape s{m, n, k};
    if (x_bf16)
        linear_with(static_cast<const bf16*>(x), w, w_bf16, bias, y, y_bf16, s);
    else
        linear_with(static_cast<const float*>(x), w, w_bf16, bias, y, y_bf16, s);
}
}
