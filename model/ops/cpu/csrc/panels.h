// Who computes what of a linear layer: threads share its panels, rows come in blocks of tiles.
//
// Knows no kind of number. A Layer brings shape, weights, TILE_ROWS, row_words(), panel_bytes(), steps(), streams(), pack()
// and tile(); every thread packs all rows for itself, which beats waiting for another to do it.
#pragma once
#include <omp.h>

#include "outputs.h"
#include "shortage.h"
#include "workspace.h"

constexpr size_t BLOCK_BYTES = 192 << 10;  // of packed rows: stays in the second-level cache beside two panels
constexpr size_t SLACK = 64;                // words that packing may write behind its last
constexpr size_t SOON = 2048, LATER = 10240;  // bytes: how far ahead of its use a weight is asked for, twice

// One tile alone runs along with memory: its own panels, a little ahead. Several tiles take turns on a panel that is in
// the cache by then, while the next panel arrives: each asks for its share of it; half a panel would not fit in the first.
static inline Ahead ahead_of(const uint8_t* panel, size_t panel_bytes, int steps, int panels, int t, int tiles) {
    if (panels > 1) return {panel, panel + SOON, STEP_BYTES, steps - int(SOON / STEP_BYTES), (panels - 1) * panel_bytes};
    if (tiles == 1) return {panel + SOON, panel + LATER, STEP_BYTES, -1, 0};
    const uint8_t* share = panel + panel_bytes + panel_bytes * t / tiles;
    return {tiles == 2 ? panel : share, share, STEP_BYTES / tiles, -1, 0};
}

// Rows [row, row + m) against panels [first, last).
template <class Layer>
static void block(const Layer& layer, int64_t row, int m, int first, int last) {
    static thread_local Workspace space;
    size_t row_words = layer.row_words(), panel_bytes = layer.panel_bytes();
    uint32_t* packed = space.get<uint32_t>(m * row_words + SLACK);
    int tiles = tile_count(m, Layer::TILE_ROWS), at_once = tiles == 1 ? layer.streams(m) : 1;
    auto start = [&](int t) { return tile_start(m, t, Layer::TILE_ROWS); };
    for (int t = 0; t < tiles; t++) layer.pack(row + start(t), start(t + 1) - start(t), packed + start(t) * row_words);
    for (int p = first, panels; p < last; p += panels) {
        panels = last - p < at_once ? 1 : at_once;
        const uint8_t* panel = layer.weights + p * panel_bytes;
        for (int t = 0; t < tiles; t++)
            layer.tile(packed + start(t) * row_words, row + start(t), start(t + 1) - start(t), p, panels,
                       ahead_of(panel, panel_bytes, layer.steps(), panels, t, tiles));
    }
}

template <class Layer>
static void run(const Layer& layer) {
    Shape s = layer.shape;
    constexpr int64_t HEIGHT = Layer::TILE_ROWS;
    int64_t fitting = BLOCK_BYTES / (layer.row_words() * sizeof(uint32_t)) / HEIGHT * HEIGHT;
    int64_t step = fitting > 2 * HEIGHT ? fitting : 2 * HEIGHT;
    Shortage shortage;
#pragma omp parallel if (s.m * s.n * s.k > 1 << 15)
    shortage.watch([&] {
        int threads = omp_get_num_threads(), me = omp_get_thread_num();
        int first = s.panels() * me / threads, last = s.panels() * (me + 1) / threads;
        for (int64_t m = 0; m < s.m && first < last; m += step)
            block(layer, m, int(s.m - m < step ? s.m - m : step), first, last);
    });
    must(shortage.outcome());
}
