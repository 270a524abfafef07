// Vectors of floats as wide as the target has them, through GCC's vector extensions.
//
// Knows no operation of a model. Compiled with -ffp-contract=off: a fused multiply-add happens where madd() is written
// and nowhere else, so every instance of a template rounds alike.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <utility>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#if defined(__AVX512F__)
constexpr int VEC_BYTES = 64, REGISTERS = 32;
#elif defined(__AVX__)
constexpr int VEC_BYTES = 32, REGISTERS = 16;
#elif defined(__aarch64__)
constexpr int VEC_BYTES = 16, REGISTERS = 32;
#else
constexpr int VEC_BYTES = 16, REGISTERS = 16;
#endif

#if defined(__AVX512BF16__) && !defined(RW_NO_DOTS)
#define RW_BF16_DOT 1
#else
#define RW_BF16_DOT 0
#endif

constexpr int LANES = VEC_BYTES / 4;
constexpr int MAX_HEAD = 512;  // widest head, in elements

typedef float vf __attribute__((vector_size(VEC_BYTES)));
typedef int32_t vi __attribute__((vector_size(VEC_BYTES)));
typedef uint32_t vu __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t vh __attribute__((vector_size(VEC_BYTES / 2)));

template <class V>
static inline V load(const void* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}

template <class V>
static inline void store(void* p, V v) {
    memcpy(p, &v, sizeof v);
}

static inline vf splat(float x) { return x - vf{}; }  // minus, not plus: -0 + 0 is not -0, so a sum would be kept

static inline vf madd(vf a, vf b, vf c) {  // a * b + c, rounded once where the CPU can
#if defined(__AVX512F__)
    return _mm512_fmadd_ps(a, b, c);
#elif defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#elif defined(__aarch64__)
    return vfmaq_f32(c, a, b);
#else
    return a * b + c;
#endif
}

// ---- bfloat16: the upper half of a float -------------------------------------------------------------------------
struct bf16 {
    uint16_t bits;
};

static inline float widen(float x) { return x; }

static inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float f;
    memcpy(&f, &bits, 4);
    return f;
}

static inline vf load_f32(const float* p) { return load<vf>(p); }
static inline vf load_f32(const bf16* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(load<__m256i>(p)), 16);
#elif defined(__AVX2__)
    return (vf)_mm256_slli_epi32(_mm256_cvtepu16_epi32(load<__m128i>(p)), 16);
#else
    return (vf)(__builtin_convertvector(load<vh>(p), vu) << 16);
#endif
}

static inline void store_f32(float* p, vf x) { store(p, x); }

static inline vh rounded_portable(vf x) {  // to bf16, to nearest even; a NaN stays one
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    return __builtin_convertvector(x == x ? rounded : vu{} + 0x7fc0, vh);
}

static inline vh rounded(vf x) {  // for weights of attention: the instruction takes what is below 2^-126 for zero
#if RW_BF16_DOT
    return (vh)_mm512_cvtneps_pbh(x);
#else
    return rounded_portable(x);
#endif
}

static inline void store_f32(bf16* p, vf x) { store(p, rounded_portable(x)); }

// The first n < LANES elements, zeros beyond.
template <class T>
static inline vf load_some(const T* p, int n) {
    T padded[LANES] = {};
    memcpy(padded, p, n * sizeof(T));
    return load_f32(padded);
}

template <class T>
static inline void store_some(T* p, vf x, int n) {
    T padded[LANES];
    store_f32(padded, x);
    memcpy(p, padded, n * sizeof(T));
}

// Elements [i, i + LANES) of an array of n; what lies beyond n reads as zero and is not written.
template <class T>
static inline vf load_at(const T* p, int i, int n) {
    return n - i >= LANES ? load_f32(p + i) : n > i ? load_some(p + i, n - i) : vf{};
}

template <class T>
static inline void store_at(T* p, int i, int n, vf x) {
    if (n - i >= LANES)
        store_f32(p + i, x);
    else if (n > i)
        store_some(p + i, x, n - i);
}

// x as an array of T would hold it.
static inline vf rounded_to(vf x, const float*) { return x; }
static inline vf rounded_to(vf x, const bf16*) {
    bf16 held[LANES];
    store_f32(held, x);
    return load_f32(held);
}

// ---- reductions and the exponential: the same value for an element in whichever lane it sits ----------------------
// The upper half of n lanes onto the lower.
template <int N, int... I>
static inline vf fold(vf x, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(x, x, (I < N / 2 ? I + N / 2 : I)...);
}

template <int N = LANES>
static inline float sum(vf x) {  // pairwise, in one order
    if constexpr (N == 1) return x[0];
    else return sum<N / 2>(x + fold<N>(x, std::make_integer_sequence<int, LANES>()));
}

template <int N = LANES>
static inline float largest(vf x) {
    if constexpr (N == 1) return x[0];
    vf other = fold<N>(x, std::make_integer_sequence<int, LANES>());
    if constexpr (N > 1) return largest<N / 2>(other > x ? other : x);
}

// 2^x for -126 <= x <= 127, relative error below 2e-7; beyond, the value at the end or nearer to the truth. NaN stays NaN.
// NEGATIVE: x is known not to be above 127.
template <bool NEGATIVE = false>
static inline vf exp2_of(vf x) {
#if defined(__AVX512DQ__)
    vf f = _mm512_reduce_ps(x, 9);  // x - floor(x)
    vf p = splat(1.8671309e-3f);
    p = madd(p, f, splat(9.0170284e-3f));
    p = madd(p, f, splat(5.5799915e-2f));
    p = madd(p, f, splat(2.4016445e-1f));
    p = madd(p, f, splat(6.9315131e-1f));
    p = madd(p, f, splat(1.0f));
    return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
#else
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
    x = x < -126.0f ? splat(-126.0f) : x;
    if (!NEGATIVE) x = x > 127.0f ? splat(127.0f) : x;
    vf shifted = x + magic;
    vf f = x - (shifted - magic);  // -0.5 .. 0.5
    vf p = splat(1.5403530393381608e-4f);
    p = madd(p, f, splat(1.3333558146428443e-3f));
    p = madd(p, f, splat(9.618129107628477e-3f));
    p = madd(p, f, splat(5.550410866482158e-2f));
    p = madd(p, f, splat(2.402265069591007e-1f));
    p = madd(p, f, splat(6.931471805599453e-1f));
    p = madd(p, f, splat(1.0f));
    return p * (vf)(((vu)shifted << 23) + (127u << 23));  // the low bits of magic vanish
#endif
}
