// Linear layers: y = x W^T + b, weights of fp32 or bf16 in panels, fp32 sums, any number of rows.
//
// Knows nothing of what a layer means. See tile.h for the order of the sums.
#include <type_traits>

#include "arguments.h"
#include "interleave.h"
#include "operations.h"

namespace {

template <class Kind, class X, class Y>
struct Linear {
    static constexpr bool DOTS = std::is_same_v<Kind, DotPairs>;
    using Expand = std::conditional_t<std::is_same_v<X, bf16> && !DOTS, Bf16Halves, Whole>;
    static constexpr int TILE_ROWS = MAX_ROWS;

    Shape shape;
    const uint8_t* weights;
    const X* x;
    const float* bias;
    Y* y;

    int64_t pairs() const { return (shape.k + 1) / 2; }
    int streams(int rows) const { return streams_for(rows); }
    int steps() const { return int(std::is_same_v<Kind, Floats> ? shape.k : pairs()); }
    size_t panel_bytes() const { return steps() * STEP_BYTES; }
    size_t row_words() const { return DOTS ? pairs() : 2 * pairs(); }

    void pack(int64_t row, int rows, uint32_t* out) const {
        interleave<Expand>(reinterpret_cast<const uint8_t*>(x + row * shape.k), shape.k * sizeof(X), rows,
                           row_words() / Expand::PARTS, out);
    }

    void tile(const uint32_t* packed, int64_t row, int rows, int panel, int panels, Ahead ahead) const {
        alignas(64) float c[MAX_ROWS * PANEL];
        far_tile<Kind>(rows, panels)(reinterpret_cast<const typename Kind::Word*>(packed), weights + panel * panel_bytes(),
                                     panel_bytes(), steps(), ahead, c, panels * PANEL);
        put_outputs(shape, row, rows, panel, panels, c, bias, y);
    }
};

template <class X, class Y>
using OfFloats = Linear<Floats, X, Y>;

template <class X, class Y>
using OfPairs = Linear<std::conditional_t<HAS_BF16_DOT && std::is_same_v<X, bf16>, DotPairs, WidenedPairs>, X, Y>;

}  // namespace

extern "C" {

int rw_panel() { return PANEL; }

int rw_linear(const void* x, int x_bf16, const void* w, int w_bf16, const float* bias, void* y, int y_bf16, int64_t m,
              int64_t n, int64_t k) {
    Arguments a{x, x_bf16 != 0, w, bias, y, y_bf16 != 0, {m, n, k}};
    return w_bf16 ? run_as<OfPairs>(a) : run_as<OfFloats>(a);
}
}
