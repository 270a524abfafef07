// Rows of 8 bits with one scale: how a row becomes them, and what they mean; mirrors model/ops/quantised_kv.py bit for bit.
//
// Knows no pages. A value is a small number that bf16 holds exactly; times the scale it is the row's.
#pragma once
#include "vec.h"

struct int8 {
    int8_t value;
};

struct fp8 {  // e4m3: sign, exponent of 4 bits with bias 7, fraction of 3; no infinity
    uint8_t bits;
};

typedef int8_t vsb __attribute__((vector_size(VEC_BYTES / 4)));
typedef uint8_t vub __attribute__((vector_size(VEC_BYTES / 4)));

template <class T>
constexpr float LARGEST = 0;  // what the largest magnitude of a row becomes; 0: the type has no scale
template <>
inline constexpr float LARGEST<int8> = 127;
template <>
inline constexpr float LARGEST<fp8> = 448;
template <class T>
constexpr bool SCALED = LARGEST<T> > 0;

// ---- values of a row -------------------------------------------------------------------------------------------------
static inline vu bytes_at(const void* p) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu8_epi32(load<__m128i>(p));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64(static_cast<const __m128i*>(p)));
#else
    return __builtin_convertvector(load<vub>(p), vu);
#endif
}

static inline vf load_f32(const int8* p) {
#if defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(p)));
#else
    return __builtin_convertvector((vi)(bytes_at(p) << 24) >> 24, vf);
#endif
}

static inline vf load_f32(const fp8* p) {
    vu bits = bytes_at(p), size = bits & 0x7f;
    vf normal = (vf)((size << 20) + (120u << 23));
    vf small = (vf)((size << 20) + (121u << 23)) - 0x1p-6f;  // without the leading one
    vf value = size < 8 ? small : normal;
    value = size == 0x7f ? splat(__builtin_nanf("")) : value;
    return (vf)((vu)value | (bits & 0x80) << 24);
}

static inline void store_f32(int8* p, vf x) {  // |x| <= 127
    vi rounded = (vi)(x + 0x1.8p23f) - 0x4b400000;  // adding it rounds to an integer in the low bits
    store(p, __builtin_convertvector(rounded, vsb));
}

static inline void store_f32(fp8* p, vf x) {  // |x| <= 448
    vu bits = (vu)x, size = bits & 0x7fffffffu;
    vu normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120u << 3);
    vu small = (vu)((vf)size + 0x1p14f) - 0x46800000u;  // below 2^-6: multiples of 2^-9
    vu code = size < 0x3c800000u ? small : normal;
    store(p, __builtin_convertvector(code | (bits >> 24 & 0x80), vub));
}

// ---- a row -----------------------------------------------------------------------------------------------------------
template <class T>
static inline float largest_size(const T* row, int d) {  // NaN counts as the largest of all
    vi most{};
    for (int i = 0; i < d; i += LANES) {
        vi size = (vi)load_at(row, i, d) & 0x7fffffff;  // ordered as the floats are
        most = size > most ? size : most;
    }
    int32_t best = 0;
    for (int i = 0; i < LANES; i++) best = most[i] > best ? most[i] : best;
    float size;
    memcpy(&size, &best, sizeof size);
    return size;
}

// row [d] -> out [d]; returns the scale. A row with NaN or infinity has such a scale, and finite values.
template <class T, class KV>
static inline float quantise_row(const T* row, int d, KV* out) {
    const float scale = largest_size(row, d) / LARGEST<KV>;
    const vf most = splat(LARGEST<KV>);
    for (int i = 0; i < d; i += LANES) {
        vf steps = load_at(row, i, d) / scale;
        steps = steps == steps ? steps : vf{};  // 0 / 0
        steps = steps > most ? most : steps;    // the rounding of a subnormal scale can leave the range
        store_at(out, i, d, steps < -most ? -most : steps);
    }
    return scale;
}
