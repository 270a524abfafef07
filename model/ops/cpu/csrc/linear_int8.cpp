// Linear layers with 8-bit weights: one scale per output, activations rounded to 8 bits with one scale per row.
//
// Knows nothing of how weights were rounded. Sums are integers, hence exact: a row's bits depend on that row alone.
// A panel step holds two k of PANEL columns: bytes (k, k + 1) of each column side by side. Both factors are widened to
// 16 bits before they are multiplied, so nothing saturates.
#include <omp.h>

#include "tile.h"
#include "workspace.h"

namespace {

constexpr size_t BLOCK_BYTES = 192 << 10;  // of rounded rows: see linear.cpp
constexpr int STEP_BYTES = 2 * PANEL;

typedef int16_t vs __attribute__((vector_size(VEC_BYTES)));
typedef int8_t vb __attribute__((vector_size(VEC_BYTES / 2)));

inline vs widen_bytes(const int8_t* p) {
#if defined(__AVX512BW__)
    return (vs)_mm512_cvtepi8_epi16(load<__m256i>(p));
#elif defined(__AVX2__)
    return (vs)_mm256_cvtepi8_epi16(load<__m128i>(p));
#else
    return __builtin_convertvector(load<vb>(p), vs);
#endif
}

inline vi dot_pairs(vs a, vs b) {  // lane i: a[2i] * b[2i] + a[2i + 1] * b[2i + 1]
#if defined(__AVX512BW__)
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (vi)((vu)a << 16) / 65536 * ((vi)((vu)b << 16) / 65536) + ((vi)a >> 16) * ((vi)b >> 16);
#endif
}

// c[r][j] over pairs of k; x: [k / 2][ROWS] pairs of 16 bits.
template <int ROWS>
__attribute__((noinline)) void int_tile(const int32_t* x, const int8_t* panel, int pairs, int32_t* c) {
    vi acc[ROWS][2] = {};
    for (int k = 0; k < pairs; k++) {
        const int8_t* step = panel + size_t(k) * STEP_BYTES;
        __builtin_prefetch(step + AHEAD, 0, 3);
        vs lo = widen_bytes(step), hi = widen_bytes(step + STEP_BYTES / 2);
#pragma GCC unroll 12
        for (int r = 0; r < ROWS; r++) {
            vs value = (vs)(vi{} + x[size_t(k) * ROWS + r]);
            acc[r][0] += dot_pairs(lo, value);
            acc[r][1] += dot_pairs(hi, value);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++) {
        store(c + r * PANEL, acc[r][0]);
        store(c + r * PANEL + LANES, acc[r][1]);
    }
}

using IntTile = void (*)(const int32_t*, const int8_t*, int, int32_t*);

template <int ROWS = MAX_ROWS>
IntTile int_tile_of(int rows) {
    if (rows == ROWS) return int_tile<ROWS>;
    if constexpr (ROWS > 1) return int_tile_of<ROWS - 1>(rows);
    return nullptr;
}

// Rounds a row to -127 .. 127 and returns its scale; a row that is not finite gets the scale NaN.
template <class X>
float round_row(const X* x, int k_len, int row, int rows, int16_t* out) {
    vf most{}, check{};
    for (int k = 0; k < k_len; k += LANES) {
        vf value = load_at(x, k, k_len), size = value < 0.0f ? -value : value;
        most = size > most ? size : most;
        check += value - value;
    }
    float top = largest(most), inverse = top > 0.0f ? 127.0f / top : 0.0f;
    for (int k = 0; k < k_len; k += LANES) {
        int32_t rounded[LANES];
        store(rounded, (vi)((vu)(load_at(x, k, k_len) * inverse + 12582912.0f) - 0x4b400000u));  // 1.5 * 2^23
        for (int i = 0; i < LANES && k + i < k_len; i++)
            out[((k + i) / 2 * rows + row) * 2 + (k + i) % 2] = int16_t(rounded[i]);
    }
    if (k_len % 2) out[(k_len / 2 * rows + row) * 2 + 1] = 0;
    return top / 127.0f + sum(check);
}

struct Shape {
    int64_t m, n, k;

    int64_t pairs() const { return (k + 1) / 2; }
};

template <class Y>
void finish(const int32_t* c, float row_scale, const float* scale, const float* bias, int columns, Y* y) {
    for (int j = 0; j < columns; j += LANES) {
        vf value = __builtin_convertvector(load<vi>(c + j), vf) * (load_at(scale, j, columns) * row_scale);
        if (bias) value += load_at(bias, j, columns);
        store_at(y, j, columns, value);
    }
}

// One block of rows, rounded by the thread that computes with it, against panels [first, last).
template <class X, class Y>
void block(const X* x, const int8_t* w, const float* scale, const float* bias, Y* y, Shape s, int m, int first,
           int last) {
    static thread_local Workspace space, scale_space;
    int32_t* rounded = space.get<int32_t>(size_t(m) * s.pairs());
    float* row_scale = scale_space.get<float>(m);
    for (int t = 0; t < tile_count(m); t++)
        for (int start = tile_start(m, t), end = tile_start(m, t + 1), r = start; r < end; r++)
            row_scale[r] = round_row(x + r * s.k, int(s.k), r - start, end - start,
                                     reinterpret_cast<int16_t*>(rounded + start * s.pairs()));
    for (int p = first; p < last; p++) {
        int64_t column = int64_t(p) * PANEL;
        int columns = int(s.n - column < PANEL ? s.n - column : PANEL);
        for (int t = 0; t < tile_count(m); t++) {
            alignas(64) int32_t c[MAX_ROWS * PANEL];
            int start = tile_start(m, t), rows = tile_start(m, t + 1) - start;
            int_tile_of(rows)(rounded + start * s.pairs(), w + p * s.pairs() * STEP_BYTES, int(s.pairs()), c);
            for (int r = 0; r < rows; r++)
                finish(c + r * PANEL, row_scale[start + r], scale + column, bias ? bias + column : nullptr, columns,
                       y + (start + r) * s.n + column);
        }
    }
}

template <class X, class Y>
void linear(const X* x, const int8_t* w, const float* scale, const float* bias, Y* y, Shape s) {
    int panels = int((s.n + PANEL - 1) / PANEL);
    int64_t fitting = BLOCK_BYTES / (s.pairs() * sizeof(int32_t)) / MAX_ROWS * MAX_ROWS;
    int64_t step = fitting > 2 * MAX_ROWS ? fitting : 2 * MAX_ROWS;
#pragma omp parallel if (s.m * s.n * s.k > 1 << 15)
    {
        int threads = omp_get_num_threads(), me = omp_get_thread_num();
        int first = panels * me / threads, last = panels * (me + 1) / threads;
        for (int64_t m = 0; m < s.m && first < last; m += step)
            block(x + m * s.k, w, scale, bias, y + m * s.n, s, int(s.m - m < step ? s.m - m : step), first, last);
    }
}

template <class X>
void linear_to(const X* x, const int8_t* w, const float* scale, const float* bias, void* y, int y_bf16, Shape s) {
    if (y_bf16)
        linear(x, w, scale, bias, static_cast<bf16*>(y), s);
    else
        linear(x, w, scale, bias, static_cast<float*>(y), s);
}

}  // namespace

extern "C" void rw_linear_int8(const void* x, int x_bf16, const int8_t* w, const float* scale, const float* bias, void* y,
                               int y_bf16, int64_t m, int64_t n, int64_t k) {
    Shape s{m, n, k};
    if (x_bf16)
        linear_to(static_cast<const bf16*>(x), w, scale, bias, y, y_bf16, s);
    else
        linear_to(static_cast<const float*>(x), w, scale, bias, y, y_bf16, s);
}
