// Linear layers with 8-bit weights: one scale per output, activations rounded to 8 bits with one scale per row.
//
// Knows nothing of how weights were rounded. Sums are integers, hence exact: a row's bits depend on that row alone.
// Weights come as w + 128, unsigned, which is what CPUs multiply with signed bytes; 128 * sum(x) is taken off again.
#include <type_traits>

#include "interleave.h"
#include "operations.h"
#include "panels.h"
#include "round_row.h"

namespace {

using Kind = std::conditional_t<HAS_BYTE_DOT, DotBytes, WidenedBytes>;
using Expand = std::conditional_t<HAS_BYTE_DOT, Whole, ByteHalves>;

template <class X, class Y>
struct Int8Linear {
    static constexpr int TILE_ROWS = MAX_ROWS;

    Shape shape;
    const uint8_t* weights;
    const X* x;
    const float *scale, *bias;
    Y* y;

    int streams(int rows) const { return streams_for(rows); }
    int steps() const { return int((shape.k + 3) / 4); }
    size_t panel_bytes() const { return steps() * STEP_BYTES; }
    size_t row_words() const { return steps() * Kind::PARTS + sizeof(Rounding) / sizeof(uint32_t); }

    Rounding* roundings(uint32_t* packed, int rows) const {  // behind the words of a tile
        return reinterpret_cast<Rounding*>(packed + rows * steps() * Kind::PARTS);
    }

    void pack(int64_t row, int rows, uint32_t* out) const {
        int8_t* bytes = rounded_rows(rows, steps() * 4);
        Rounding rounding[MAX_ROWS];
        for (int r = 0; r < rows; r++) rounding[r] = round_row(x + (row + r) * shape.k, int(shape.k), bytes + r * steps() * 4);
        interleave<Expand>(reinterpret_cast<const uint8_t*>(bytes), steps() * 4, rows, steps(), out);
        memcpy(roundings(out, rows), rounding, rows * sizeof(Rounding));
    }

    void tile(uint32_t* packed, int64_t row, int rows, int panel, int panels, Ahead ahead) const {
        alignas(64) int32_t c[MAX_ROWS * PANEL];
        size_t stride = panels * PANEL;
        far_tile<Kind>(rows, panels)(packed, weights + panel * panel_bytes(), panel_bytes(), steps(), ahead, c, stride);
        int64_t column = int64_t(panel) * PANEL;
        for (int r = 0; r < rows; r++)
            finish(c + r * stride, roundings(packed, rows)[r], column, columns_of(shape, panel, panels),
                   y + (row + r) * shape.n + column);
    }

    void finish(const int32_t* c, Rounding rounding, int64_t column, int columns, Y* out) const {
        for (int j = 0; j < columns; j += LANES) {
            vi sum = (vi)(load<vu>(c + j) - 128u * uint32_t(rounding.sum));
            vf value = __builtin_convertvector(sum, vf) * (load_at(scale + column, j, columns) * rounding.scale);
            if (bias) value += load_at(bias + column, j, columns);
            store_at(out, j, columns, value);
        }
    }
};

template <class X>
void linear_to(Shape s, const X* x, const uint8_t* w, const float* scale, const float* bias, void* y, bool y_bf16) {
    if (y_bf16)
        run(Int8Linear<X, bf16>{s, w, x, scale, bias, static_cast<bf16*>(y)});
    else
        run(Int8Linear<X, float>{s, w, x, scale, bias, static_cast<float*>(y)});
}

}  // namespace

extern "C" void rw_linear_int8(const void* x, int x_bf16, const void* w, const float* scale, const float* bias, void* y,
                               int y_bf16, int64_t m, int64_t n, int64_t k) {
    auto weights = static_cast<const uint8_t*>(w);
    if (x_bf16)
        linear_to({m, n, k}, static_cast<const bf16*>(x), weights, scale, bias, y, y_bf16);
    else
        linear_to({m, n, k}, static_cast<const float*>(x), weights, scale, bias, y, y_bf16);
}
