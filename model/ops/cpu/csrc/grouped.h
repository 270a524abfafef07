// Linear layers with rounded weights: bf16 scales per output and group of inputs, activations rounded likewise.
//
// Knows nothing of how weights were rounded: a Weights says how wide a group is, whether its inputs are turned, and how a
// step is read and multiplied. Within a group sums are integers, hence exact; groups are added in fp32 in ascending order,
// whoever computes them: a row's bits depend on that row alone. Weights are unsigned, which is what CPUs multiply with
// signed bytes. What they are too large by is a whole number of steps, taken off where a group starts, or (MINIMA) the
// group's least weight, added behind it. In a panel the group's scales follow its steps, and the minima these.
#pragma once
#include "interleave.h"
#include "outputs.h"
#include "round_group.h"

constexpr int ROWS_AHEAD = 256;  // words: a panel and the rows of all tiles do not fit in the first cache together

template <class Weights>
constexpr size_t scale_bytes() {
    return (Weights::MINIMA ? 2 : 1) * PANEL * sizeof(bf16);
}

template <class Weights>
constexpr size_t group_bytes() {
    return Weights::STEPS * STEP_BYTES + scale_bytes<Weights>();
}

// What a tile reads of its rows: [group][row], [group][row] and [group][step][part][row].
struct RoundedRows {
    const uint32_t* terms;  // the sum of the rounded values as Weights::term() wants it
    const float* scales;
    const uint32_t* words;
};

template <class Weights, int ROWS, int PANELS>
static inline void products_of_group(const RoundedRows& x, const uint8_t* w, size_t panel_bytes, Ahead& ahead, int step,
                                     vi (&sum)[ROWS][PANELS][2]) {
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) sum[r][p][0] = sum[r][p][1] = Weights::start(x.terms[r]);
    for (int i = 0; i < Weights::STEPS; i++) {
        ask<PANELS>(ahead, step + i, panel_bytes);
        __builtin_prefetch(x.words + i * Weights::PARTS * ROWS + ROWS_AHEAD, 0, 3);
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++)
#pragma GCC unroll 2
            for (int part = 0; part < Weights::PARTS; part++) {
                const uint8_t* at = fresh(w + p * panel_bytes + i * STEP_BYTES);
                const uint32_t* values = fresh(x.words + (i * Weights::PARTS + part) * ROWS);
                auto lo = Weights::weights(at, part), hi = Weights::weights(at + VEC_BYTES, part);
#pragma GCC unroll 12
                for (int r = 0; r < ROWS; r++) {
                    auto value = Weights::spread(values[r]);
                    sum[r][p][0] = Weights::dot(lo, value, sum[r][p][0]);
                    sum[r][p][1] = Weights::dot(hi, value, sum[r][p][1]);
                }
            }
    }
}

// c[r * stride + j] += products times both scales, for the columns of one vector.
template <class Weights, int ROWS, class Products>
static inline void add_group(const RoundedRows& x, const uint8_t* scales, Products products, float* c, size_t stride) {
    vf scale = load_f32(reinterpret_cast<const bf16*>(scales)), minimum{};
    if constexpr (Weights::MINIMA) minimum = load_f32(reinterpret_cast<const bf16*>(scales) + PANEL);
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        vf value = __builtin_convertvector(Weights::widened(products(r)), vf) * scale;
        vf before = load<vf>(c + r * stride);
        if constexpr (Weights::MINIMA) before = madd(minimum, (vf)(vu{} + x.terms[r]), before);
        store(c + r * stride, madd(value, splat(x.scales[r]), before));
    }
}

// c[r][p * PANEL + j] = sum over groups of products times both scales.
template <class Weights, int ROWS, int PANELS>
__attribute__((noinline)) static void grouped_tile(RoundedRows x, const uint8_t* w, size_t panel_bytes, int groups,
                                                   Ahead ahead, float* c) {
    for (int j = 0; j < ROWS * PANELS * PANEL; j += LANES) store(c + j, vf{});
    for (int g = 0; g < groups; g++) {
        vi sum[ROWS][PANELS][2];
        products_of_group<Weights>(x, w, panel_bytes, ahead, g * Weights::STEPS, sum);
        float* out = fresh(c);  // not kept in registers, which are few, and on the stack besides
#pragma GCC unroll 8
        for (int column = 0; column < 2 * PANELS; column++) {
            int p = column / 2, half = column % 2;
            const uint8_t* scales = w + p * panel_bytes + Weights::STEPS * STEP_BYTES + half * LANES * sizeof(bf16);
            add_group<Weights, ROWS>(x, scales, [&](int r) { return sum[r][p][half]; }, out + column * LANES, PANELS * PANEL);
        }
        w += group_bytes<Weights>(), ahead.skip(scale_bytes<Weights>());
        x.words += Weights::STEPS * Weights::PARTS * ROWS, x.terms += ROWS, x.scales += ROWS;
    }
}

using GroupedTile = void (*)(RoundedRows, const uint8_t*, size_t, int, Ahead, float*);

template <class Weights, int ROWS = Weights::TILE_ROWS>
static GroupedTile grouped_tile_of(int rows, int panels) {
    constexpr int TOGETHER = streams_for(ROWS);
    if (rows == ROWS) return panels == 1 ? grouped_tile<Weights, ROWS, 1> : grouped_tile<Weights, ROWS, TOGETHER>;
    if constexpr (ROWS > 1) return grouped_tile_of<Weights, ROWS - 1>(rows, panels);
    return nullptr;
}

template <class Weights, class X, class Y>
struct GroupedLinear {
    static constexpr int TILE_ROWS = Weights::TILE_ROWS, WORDS = Weights::STEPS * Weights::PARTS;
    static constexpr int GROUP = Weights::GROUP;

    Shape shape;
    const uint8_t* weights;
    const X* x;
    const float* bias;
    Y* y;

    int groups() const { return int((shape.k + GROUP - 1) / GROUP); }
    int steps() const { return groups() * Weights::STEPS; }
    size_t panel_bytes() const { return groups() * group_bytes<Weights>(); }
    size_t row_words() const { return groups() * (WORDS + 2); }
    int streams(int rows) const { return streams_for(rows); }

    void pack(int64_t row, int rows, uint32_t* out) const {
        size_t row_bytes = groups() * GROUP;
        int8_t* bytes = rounded_rows(rows, row_bytes);
        for (int r = 0; r < rows; r++)
            for (int g = 0; g < groups(); g++) {
                int64_t first = g * GROUP;
                Rounding rounding = round_group<GROUP, Weights::TURNED>(
                    x + (row + r) * shape.k + first, int(std::min<int64_t>(GROUP, shape.k - first)),
                    bytes + r * row_bytes + first);
                out[g * rows + r] = Weights::term(rounding);
                memcpy(out + (groups() + g) * rows + r, &rounding.scale, sizeof(float));
            }
        interleave<typename Weights::Expand>(reinterpret_cast<const uint8_t*>(bytes), row_bytes, rows,
                                             groups() * GROUP / 4, out + 2 * groups() * rows);
    }

    RoundedRows rounded(const uint32_t* packed, int rows) const {
        return {packed, reinterpret_cast<const float*>(packed + groups() * rows),
                packed + 2 * groups() * rows};
    }

    void tile(const uint32_t* packed, int64_t row, int rows, int panel, int panels, Ahead ahead) const {
        alignas(64) float c[MAX_ROWS * PANEL];
        grouped_tile_of<Weights>(rows, panels)(rounded(packed, rows), weights + panel * panel_bytes(), panel_bytes(),
                                               groups(), ahead, c);
        put_outputs(shape, row, rows, panel, panels, c, bias, y);
    }
};
