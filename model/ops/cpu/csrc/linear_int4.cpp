// Linear layers with 4-bit weights: see grouped.h.
//
// Knows how a step is multiplied: 8 k of PANEL columns. Byte b of a word holds k = b in its low half and k = 4 + b in its
// high half, as steps above the group's minimum.
#include "arguments.h"
#include "grouped.h"
#include "operations.h"

namespace {

// Sums of a group are 16 bits wide where that is what the CPU multiplies bytes into: 16 products of 15 * 127 at most fit.
#if defined(__AVX2__)
constexpr bool NARROW = !HAS_BYTE_DOT;
#else
constexpr bool NARROW = false;
#endif

struct Nibbles {
    using Expand = Whole;
    static constexpr int PARTS = 2, GROUP = 32, STEPS = GROUP / 8;
    static constexpr bool TURNED = false, MINIMA = true;
    static constexpr int TILE_ROWS = REGISTERS == 32 ? 12 : 4;  // two sums a row, two weight vectors, broadcast, product, mask

    static uint32_t term(Rounding rounding) {  // what the minimum is multiplied by
        float share = rounding.scale * float(int32_t(rounding.sum));
        uint32_t bits;
        memcpy(&bits, &share, sizeof bits);
        return bits;
    }
    static vi start(uint32_t) { return vi{}; }
    static vi weights(const uint8_t* p, int part) { return (vi)(load<vu>(p) >> (4 * part) & 0x0f0f0f0fu); }
    static vi spread(uint32_t x) { return (vi)(vu{} + x); }
    static vi widened(vi sum) { return NARROW ? dot_shorts((vs)sum, vs{} + 1) : sum; }

    static vi dot(vi w, vi x, vi sum) {
#if defined(__AVX512BW__)
        if (NARROW) return pinned((vi)((vs)sum + (vs)_mm512_maddubs_epi16((__m512i)w, (__m512i)x)));
#elif defined(__AVX2__)
        if (NARROW) return pinned((vi)((vs)sum + (vs)_mm256_maddubs_epi16((__m256i)w, (__m256i)x)));
#endif
        return dot_bytes(w, x, sum);
    }
};

template <class X, class Y>
using Layer = GroupedLinear<Nibbles, X, Y>;

}  // namespace

extern "C" int rw_linear_int4(const void* x, int x_bf16, const void* w, const float* bias, void* y, int y_bf16, int64_t m,
                              int64_t n, int64_t k) {
    return run_as<Layer>({x, x_bf16 != 0, w, bias, y, y_bf16 != 0, {m, n, k}});
}
