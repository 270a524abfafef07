// Linear layers with 4-bit weights: one scale per output and group of GROUP inputs, activations rounded to 8 bits.
//
// Knows nothing of how weights were rounded. Within a group sums are integers, hence exact; groups are added in fp32 in
// ascending order, whoever computes them. A step is 8 k of PANEL columns: byte b of a word holds k = b in its low half and
// k = 4 + b in its high half, both as w + 8. The group's scales follow its steps.
#include "interleave.h"
#include "operations.h"
#include "panels.h"
#include "round_row.h"

namespace {

constexpr int GROUP = 64, GROUP_STEPS = GROUP / 8, GROUP_WORDS = GROUP / 4;
constexpr size_t GROUP_BYTES = GROUP_STEPS * STEP_BYTES + PANEL * sizeof(bf16);
constexpr int MOST_ROWS = REGISTERS == 32 ? 12 : 4;  // 2 sums a row, two weight vectors, one broadcast, one product, a mask

// ---- sums of a run of steps: 16 bits wide where that is what the CPU multiplies bytes into ---------------------------
#if defined(__AVX2__)
constexpr bool NARROW = !HAS_BYTE_DOT;
#else
constexpr bool NARROW = false;
#endif
constexpr int RUN = NARROW ? 4 : GROUP_STEPS;  // steps: 8 pairs of products of 15 * 127 at most fit in 16 bits

inline vi add_products(vi w, vi x, vi sum) {
#if defined(__AVX512BW__)
    if (NARROW) return pinned((vi)((vs)sum + (vs)_mm512_maddubs_epi16((__m512i)w, (__m512i)x)));
#elif defined(__AVX2__)
    if (NARROW) return pinned((vi)((vs)sum + (vs)_mm256_maddubs_epi16((__m256i)w, (__m256i)x)));
#endif
    return dot_bytes(w, x, sum);
}

inline vi widened(vi sum) { return NARROW ? dot_shorts((vs)sum, vs{} + 1) : sum; }

// Products of RUN steps; x: [quad][ROWS], quads of signed bytes.
template <int ROWS>
inline void run_of_steps(const uint32_t* x, const uint8_t* w, Ahead& ahead, int step, vi (&sum)[ROWS][2]) {
    for (int i = 0; i < RUN; i++) {
        ask<1>(ahead, step + i, 0);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            const uint8_t* at = fresh(w + i * STEP_BYTES);
            vi lo = (vi)(load<vu>(at) >> (4 * part) & 0x0f0f0f0fu);
            vi hi = (vi)(load<vu>(at + VEC_BYTES) >> (4 * part) & 0x0f0f0f0fu);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++) {
                vi value = (vi)(vu{} + x[(2 * i + part) * ROWS + r]);
                sum[r][0] = add_products(lo, value, sum[r][0]);
                sum[r][1] = add_products(hi, value, sum[r][1]);
            }
        }
    }
}

// c[r][j] = sum over groups of scale * (products - eights[group][r]).
template <int ROWS>
__attribute__((noinline)) void int4_tile(const uint32_t* x, const int32_t* eights, const uint8_t* w, int groups,
                                         Ahead ahead, float* c) {
    vf zero{};
    for (int j = 0; j < ROWS * PANEL; j += LANES) store(c + j, zero);
    for (int g = 0; g < groups; g++, w += GROUP_BYTES, x += GROUP_WORDS * ROWS, eights += ROWS) {
        vi total[ROWS][2] = {};
        for (int first = 0; first < GROUP_STEPS; first += RUN) {
            vi sum[ROWS][2] = {};
            run_of_steps<ROWS>(x + 2 * first * ROWS, w + first * STEP_BYTES, ahead, g * GROUP_STEPS + first, sum);
#pragma GCC unroll 12
            for (int r = 0; r < ROWS; r++)
                for (int half = 0; half < 2; half++) total[r][half] += widened(sum[r][half]);
        }
        const bf16* scales = reinterpret_cast<const bf16*>(w + GROUP_STEPS * STEP_BYTES);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++)
            for (int half = 0; half < 2; half++) {
                float* at = c + r * PANEL + half * LANES;
                vf products = __builtin_convertvector(total[r][half] - eights[r], vf);
                store(at, madd(load_f32(scales + half * LANES), products, load<vf>(at)));
            }
    }
}

using Int4Tile = void (*)(const uint32_t*, const int32_t*, const uint8_t*, int, Ahead, float*);

template <int ROWS = MOST_ROWS>
Int4Tile int4_tile_of(int rows) {
    if (rows == ROWS) return int4_tile<ROWS>;
    if constexpr (ROWS > 1) return int4_tile_of<ROWS - 1>(rows);
    return nullptr;
}

template <class X, class Y>
struct Int4Linear {
    static constexpr int TILE_ROWS = MOST_ROWS;

    Shape shape;
    const uint8_t* weights;
    const X* x;
    const float* bias;
    Y* y;

    int groups() const { return int((shape.k + GROUP - 1) / GROUP); }
    int steps() const { return groups() * GROUP_STEPS; }
    size_t panel_bytes() const { return groups() * GROUP_BYTES; }
    size_t row_words() const { return groups() * (GROUP_WORDS + 1) + 1; }  // values, sums of groups, scale
    int streams(int) const { return 1; }

    int32_t* eights(uint32_t* packed, int rows) const {
        return reinterpret_cast<int32_t*>(packed + rows * groups() * GROUP_WORDS);
    }
    float* row_scales(uint32_t* packed, int rows) const {
        return reinterpret_cast<float*>(packed + rows * groups() * (GROUP_WORDS + 1));
    }

    void pack(int64_t row, int rows, uint32_t* out) const {
        size_t row_bytes = groups() * GROUP;
        int8_t* bytes = rounded_rows(rows, row_bytes);
        float scales[MOST_ROWS];
        for (int r = 0; r < rows; r++) {
            int8_t* own = bytes + r * row_bytes;
            memset(own, 0, row_bytes);
            scales[r] = round_row(x + (row + r) * shape.k, int(shape.k), own).scale;
        }
        interleave<Whole>(reinterpret_cast<const uint8_t*>(bytes), row_bytes, rows, groups() * GROUP_WORDS, out);
        memcpy(row_scales(out, rows), scales, rows * sizeof(float));
        for (int g = 0; g < groups(); g++)
            for (int r = 0; r < rows; r++) {
                int32_t sum = 0;
                for (int k = 0; k < GROUP; k++) sum += bytes[r * row_bytes + g * GROUP + k];
                eights(out, rows)[g * rows + r] = 8 * sum;
            }
    }

    void tile(uint32_t* packed, int64_t row, int rows, int panel, int panels, Ahead ahead) const {
        alignas(64) float c[MOST_ROWS * PANEL];
        int4_tile_of(rows)(packed, eights(packed, rows), weights + panel * panel_bytes(), groups(), ahead, c);
        int64_t column = int64_t(panel) * PANEL;
        int columns = columns_of(shape, panel, panels);
        for (int r = 0; r < rows; r++)
            for (int j = 0; j < columns; j += LANES) {
                vf value = load<vf>(c + r * PANEL + j) * row_scales(packed, rows)[r];
                if (bias) value += load_at(bias + column, j, columns);
                store_at(y + (row + r) * shape.n + column, j, columns, value);
            }
    }
};

template <class X>
void linear_to(Shape s, const X* x, const uint8_t* w, const float* bias, void* y, bool y_bf16) {
    if (y_bf16)
        run(Int4Linear<X, bf16>{s, w, x, bias, static_cast<bf16*>(y)});
    else
        run(Int4Linear<X, float>{s, w, x, bias, static_cast<float*>(y)});
}

}  // namespace

extern "C" void rw_linear_int4(const void* x, int x_bf16, const void* w, const float* bias, void* y, int y_bf16, int64_t m,
                               int64_t n, int64_t k) {
    auto weights = static_cast<const uint8_t*>(w);
    if (x_bf16)
        linear_to({m, n, k}, static_cast<const bf16*>(x), weights, bias, y, y_bf16);
    else
        linear_to({m, n, k}, static_cast<const float*>(x), weights, bias, y, y_bf16);
}
