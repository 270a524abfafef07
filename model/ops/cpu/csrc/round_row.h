// Activations rounded to 8 bits, one scale per row. Knows no layers.
#pragma once
#include "vec.h"
#include "workspace.h"

typedef int8_t few_bytes __attribute__((vector_size(LANES)));

struct Rounding {
    float scale;  // NaN for a row that is not finite
    int32_t sum;  // of the rounded values
};

static inline int8_t* rounded_rows(int rows, size_t row_bytes) {
    static thread_local Workspace space;
    return space.get<int8_t>(rows * row_bytes + LANES);
}

static inline void store_low_bytes(int8_t* p, vu x) {
#if defined(__AVX512F__)
    store(p, _mm512_cvtepi32_epi8((__m512i)x));
#elif defined(__AVX2__)
    __m256i first = _mm256_set1_epi32(0x0c080400);  // bytes 0, 4, 8, 12 of each half
    __m256i gathered = _mm256_shuffle_epi8((__m256i)x, first);
    store(p, _mm_unpacklo_epi32(_mm256_castsi256_si128(gathered), _mm256_extracti128_si256(gathered, 1))[0]);
#else
    store(p, __builtin_convertvector((vi)x, few_bytes));
#endif
}

// The largest size in a row, as the bits of a float: these are ordered like the sizes, and what is not finite comes last.
template <class X>
static int32_t largest_bits(const X* x, int k_len) {
    vi most{};
    for (int k = 0; k < k_len; k += LANES) {
        vi size = (vi)((vu)load_at(x, k, k_len) & 0x7fffffffu);
        most = size > most ? size : most;
    }
    int32_t lanes[LANES], best = 0;
    store(lanes, most);
    for (int32_t lane : lanes) best = lane > best ? lane : best;
    return best;
}

// Rounds to -127 .. 127; out is filled with zeros up to a multiple of 4, and may be overwritten up to one of LANES.
template <class X>
static Rounding round_row(const X* x, int k_len, int8_t* out) {
    int32_t bits = largest_bits(x, k_len);
    bool finite = bits < 0x7f800000;
    float top;
    memcpy(&top, &bits, sizeof top);
    float inverse = finite && bits ? 127.0f / top : 0.0f;
    vu total{};
    for (int k = 0; k < k_len; k += LANES) {
        vu rounded = (vu)(load_at(x, k, k_len) * inverse + 12582912.0f) - 0x4b400000u;  // 1.5 * 2^23
        total += rounded;
        store_low_bytes(out + k, rounded);
    }
    uint32_t lanes[LANES], sum = 0;
    store(lanes, total);
    for (uint32_t lane : lanes) sum += lane;
    return {finite ? top / 127.0f : __builtin_nanf(""), int32_t(sum)};
}
