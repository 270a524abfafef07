// Linear layers: y = x W^T + b, weights of fp32 or bf16 in panels, fp32 sums, any number of rows.
//
// Knows nothing of what a layer means. See tile.h for the order of the sums.
#include <type_traits>

#include "interleave.h"
#include "operations.h"
#include "panels.h"

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
        size_t stride = panels * PANEL;
        far_tile<Kind>(rows, panels)(reinterpret_cast<const typename Kind::Word*>(packed), weights + panel * panel_bytes(),
                                     panel_bytes(), steps(), ahead, c, stride);
        int64_t column = int64_t(panel) * PANEL;
        int columns = columns_of(shape, panel, panels);
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < columns; j += LANES) {
                vf value = load<vf>(c + r * stride + j);
                if (bias) value += load_at(bias + column, j, columns);
                store_at(y + (row + r) * shape.n + column, j, columns, value);
            }
    }
};

struct Arguments {
    Shape shape;
    const void *x, *weights;
    const float* bias;
    void* y;
};

template <class Kind, class X, class Y>
void linear(const Arguments& a) {
    run(Linear<Kind, X, Y>{a.shape, static_cast<const uint8_t*>(a.weights), static_cast<const X*>(a.x), a.bias,
                           static_cast<Y*>(a.y)});
}

template <class Kind, class X>
void linear_to(const Arguments& a, bool y_bf16) {
    y_bf16 ? linear<Kind, X, bf16>(a) : linear<Kind, X, float>(a);
}

template <class X>
void linear_with(const Arguments& a, bool w_bf16, bool y_bf16) {
    using Pairs = std::conditional_t<HAS_BF16_DOT && std::is_same_v<X, bf16>, DotPairs, WidenedPairs>;
    w_bf16 ? linear_to<Pairs, X>(a, y_bf16) : linear_to<Floats, X>(a, y_bf16);
}

}  // namespace

extern "C" {

int rw_panel() { return PANEL; }

void rw_linear(const void* x, int x_bf16, const void* w, int w_bf16, const float* bias, void* y, int y_bf16, int64_t m,
               int64_t n, int64_t k) {
    Arguments a{{m, n, k}, x, w, bias, y};
    x_bf16 ? linear_with<bf16>(a, w_bf16, y_bf16) : linear_with<float>(a, w_bf16, y_bf16);
}
}
