// Activations rounded to 8 bits, one scale per row and group of inputs, which may be turned first so that its values are alike.
//
// Knows no layers. The turn is a Hadamard matrix, which weights have seen as well, so products keep their value: one large
// input becomes 64 of an eighth, and the step between whole numbers shrinks with the largest.
#pragma once
#include "vec.h"
#include "workspace.h"

constexpr float NOTHING = 1e-30f;  // a group with no larger value counts as zeros

typedef int8_t few_bytes __attribute__((vector_size(LANES)));

struct Rounding {
    float scale;   // NaN for a group that is not finite
    uint32_t sum;  // of the rounded values
};

static inline int8_t* rounded_rows(int rows, size_t row_bytes) {
    static thread_local Workspace space;
    return space.get<int8_t>(rows * row_bytes);
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

// ---- the turn: sums and differences of values 1, 2, 4, .. apart, in this order ---------------------------------------
template <int APART, int... I>
static inline vf with_neighbour(vf x, std::integer_sequence<int, I...>) {
    return madd(x, vf{(I & APART ? -1.0f : 1.0f)...}, __builtin_shufflevector(x, x, (I ^ APART)...));
}

template <int VECS, int APART = 1>
static inline void turn(vf (&x)[VECS]) {
    if constexpr (APART < LANES) {
        for (vf& v : x) v = with_neighbour<APART>(v, std::make_integer_sequence<int, LANES>());
    } else {
        constexpr int OTHER = APART / LANES;
        for (int i = 0; i < VECS; i++)
            if (!(i & OTHER)) {
                vf a = x[i], b = x[i + OTHER];
                x[i] = a + b, x[i + OTHER] = a - b;
            }
    }
    if constexpr (APART * 2 < VECS * LANES) turn<VECS, APART * 2>(x);
}

// ---- rounding --------------------------------------------------------------------------------------------------------
// The largest size, as the bits of a float: these are ordered like the sizes, and what is not finite comes last.
template <int VECS>
static inline int32_t largest_bits(const vf (&x)[VECS]) {
    vi most{};
    for (vf v : x) {
        vi size = (vi)((vu)v & 0x7fffffffu);
        most = size > most ? size : most;
    }
    int32_t best = 0;
    for (int i = 0; i < LANES; i++) best = most[i] > best ? most[i] : best;
    return best;
}

// The first k_len <= GROUP values of x, zeros beyond -> GROUP bytes from -127 to 127.
template <int GROUP, bool TURNED, class X>
static Rounding round_group(const X* x, int k_len, int8_t* out) {
    constexpr int VECS = GROUP / LANES;
    static_assert(!TURNED || GROUP == 64);
    constexpr float ROOT = TURNED ? 8 : 1;  // of GROUP: the turn makes so much of a value that it is divided by again
    vf values[VECS];
    for (int i = 0; i < VECS; i++) values[i] = load_at(x, i * LANES, k_len);
    if constexpr (TURNED) turn(values);
    int32_t bits = largest_bits(values);
    bool finite = bits < 0x7f800000;
    float top;
    memcpy(&top, &bits, sizeof top);
    float inverse = finite && top > NOTHING ? 127.0f / top : 0.0f;
    vu total{};
    for (int i = 0; i < VECS; i++) {
        vu rounded = (vu)(values[i] * inverse + 12582912.0f) - 0x4b400000u;  // 1.5 * 2^23
        total += rounded;
        store_low_bytes(out + i * LANES, rounded);
    }
    uint32_t sum = 0;
    for (int i = 0; i < LANES; i++) sum += total[i];
    return {finite ? top / (127.0f * ROOT) : __builtin_nanf(""), sum};
}
