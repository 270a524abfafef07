// Linear layers with 8-bit weights: see grouped.h.
//
// Knows how a step is multiplied: 4 k of PANEL columns, a quad of bytes each, all of w + 128.
#include <type_traits>

#include "arguments.h"
#include "grouped.h"
#include "operations.h"

namespace {

struct Bytes : std::conditional_t<HAS_BYTE_DOT, DotBytes, WidenedBytes> {
    using Expand = std::conditional_t<HAS_BYTE_DOT, Whole, ByteHalves>;
    static constexpr int TILE_ROWS = MAX_ROWS, GROUP = 64, STEPS = GROUP / 4;
    static constexpr bool TURNED = true, MINIMA = false;

    static uint32_t term(Rounding rounding) { return -128 * rounding.sum; }
    static vi start(uint32_t term) { return (vi)(vu{} + term); }
    static vi widened(vi sum) { return sum; }
};

template <class X, class Y>
using Layer = GroupedLinear<Bytes, X, Y>;

}  // namespace

extern "C" int rw_linear_int8(const void* x, int x_bf16, const void* w, const float* bias, void* y, int y_bf16, int64_t m,
                              int64_t n, int64_t k) {
    return run_as<Layer>({x, x_bf16 != 0, w, bias, y, y_bf16 != 0, {m, n, k}});
}
