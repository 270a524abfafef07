// One cut of a sequence's keys and values, gathered from its pages into the panels that tile() reads.
//
// Knows pages, not queries. Keys become [CUT / PANEL][d][PANEL] (a lane is a key), values [d / PANEL][CUT][PANEL]
// (a lane is a dimension): floats, or pairs of bf16, two dimensions of a key and two keys of a dimension, where the CPU
// multiplies pairs. Tokens outside [first, last) are zeros, whatever their slots hold.
#pragma once
#include <algorithm>
#include <utility>

#include "slots.h"
#include "tile.h"

constexpr int CUT = 64;  // KV_CUT of model/ops/interface.py

template <class T>
inline constexpr T zeros[MAX_HEAD] = {};

// Where the rows of a cut lie; a row of zeros for a token that is not to be read.
template <class T>
struct CutRows {
    const T *k[CUT], *v[CUT];
};

template <class T>
struct ScaledRows : CutRows<T> {
    const T *k_scale[CUT], *v_scale[CUT];  // each the bytes of a float
};

template <class T>
using StoredRows = std::conditional_t<SCALED<T>, ScaledRows<T>, CutRows<T>>;

template <class T>
struct Pages {
    Slots<const T> k, v;
    const int32_t* table;  // the pages of one sequence

    // The rows of tokens [start, start + CUT) of one head that are in [first, last).
    void find(int64_t kv_head, int64_t start, int64_t first, int64_t last, StoredRows<T>& out) const {
        int from = int(std::clamp<int64_t>(first - start, 0, CUT)), to = int(std::clamp<int64_t>(last - start, from, CUT));
        hide(0, from, out), hide(to, CUT, out);
        for (int j = from; j < to;) {
            int64_t token = start + j, offset = token % k.page_size, page = table[token / k.page_size];
            const T *keys = k.head(page, kv_head), *values = v.head(page, kv_head);
            for (int end = int(std::min<int64_t>(j + k.page_size - offset, to)); j < end; j++, offset++) {
                out.k[j] = keys + offset * k.d, out.v[j] = values + offset * k.d;
                if constexpr (SCALED<T>) out.k_scale[j] = k.scale(keys, offset), out.v_scale[j] = v.scale(values, offset);
            }
        }
    }

private:
    static void hide(int from, int to, StoredRows<T>& out) {
        std::fill(out.k + from, out.k + to, zeros<T>), std::fill(out.v + from, out.v + to, zeros<T>);
        if constexpr (SCALED<T>)
            std::fill(out.k_scale + from, out.k_scale + to, zeros<T>), std::fill(out.v_scale + from, out.v_scale + to, zeros<T>);
    }
};

// Asks for a row of d elements that will be read a cut later.
template <class T>
static inline void prefetch_row(const T* row, int64_t d) {
    for (int64_t i = 0; i < d; i += int64_t(64 / sizeof(T))) __builtin_prefetch(row + i, 0, 2);
}

// ---- a square of words turned over in registers ----------------------------------------------------------------------
template <int H, int... I>
static inline void exchange(vu& a, vu& b, std::integer_sequence<int, I...>) {
    vu low = __builtin_shufflevector(a, b, ((I & H) ? LANES + I - H : I)...);
    b = __builtin_shufflevector(a, b, ((I & H) ? LANES + I : I + H)...);
    a = low;
}

template <int H = 1>
static inline void transpose(vu (&v)[LANES]) {
#if defined(__AVX512F__)  // what follows below, in instructions that leave their operands alone
    __m512i pairs[LANES], quads[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        pairs[i] = _mm512_unpacklo_epi32((__m512i)v[i], (__m512i)v[i + 1]);
        pairs[i + 1] = _mm512_unpackhi_epi32((__m512i)v[i], (__m512i)v[i + 1]);
    }
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {  // quads[4g + c]: column 4b + c of rows 4g .. 4g + 3 in quarter b
        int low = i / 4 * 4 + i % 4 / 2;
        quads[i] = _mm512_unpacklo_epi64(pairs[low], pairs[low + 2]);
        quads[i + 1] = _mm512_unpackhi_epi64(pairs[low], pairs[low + 2]);
    }
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        __m512i even[2], odd[2];
        for (int half = 0; half < 2; half++) {
            even[half] = _mm512_shuffle_i32x4(quads[8 * half + c], quads[8 * half + 4 + c], 0x88);
            odd[half] = _mm512_shuffle_i32x4(quads[8 * half + c], quads[8 * half + 4 + c], 0xdd);
        }
        v[c] = (vu)_mm512_shuffle_i32x4(even[0], even[1], 0x88);
        v[4 + c] = (vu)_mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
        v[8 + c] = (vu)_mm512_shuffle_i32x4(even[0], even[1], 0xdd);
        v[12 + c] = (vu)_mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
    }
#else
    if constexpr (H < LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & H)) exchange<H>(v[i], v[i + H], std::make_integer_sequence<int, LANES>());
        transpose<2 * H>(v);
    }
#endif
}

// LANES words of a row of d elements, from element i on.
template <class T>
static inline vu words_at(const T* row, int64_t i, int64_t d) {
    constexpr int COUNT = LANES * 4 / sizeof(T);
    if (d - i >= COUNT) return load<vu>(row + i);
    T padded[COUNT] = {};
    memcpy(padded, row + i, (d - i) * sizeof(T));
    return load<vu>(padded);
}

// ---- rows of the cache as factors ------------------------------------------------------------------------------------
// Kind is what they are multiplied by, T what they are stored as. A word of a key becomes PARTS vectors of factors; a step
// of a weighted sum takes KEYS keys.
template <class Kind, class T>
struct Factors {
    static constexpr int PER_WORD = 4 / sizeof(T), PARTS = PER_WORD, KEYS = 1;

    static vf part(vu word, int i) {
        if constexpr (PARTS == 1) return (vf)word;
        return i ? high_half(word) : low_half(word);
    }

    // Dimensions [i + v * LANES, i + (v + 1) * LANES) of a step's keys.
    static vf value(const T* const* keys, int i, int v, int d) { return load_at(keys[0], i + v * LANES, d); }
};

template <int HIGH, int... I>
static inline vu paired(vus a, vus b, std::integer_sequence<int, I...>) {  // a's half and b's, element by element
    return (vu)__builtin_shufflevector(a, b, (HIGH * LANES + I / 2 + (I % 2) * 2 * LANES)...);
}

template <>
struct Factors<DotPairs, bf16> {
    static constexpr int PER_WORD = 2, PARTS = 1, KEYS = 2;

    static vu part(vu word, int) { return word; }

    static vu value(const bf16* const* keys, int i, int v, int d) {
        constexpr auto ALL = std::make_integer_sequence<int, 2 * LANES>();
        vus a = (vus)words_at(keys[0], i + v / 2 * PANEL, d), b = (vus)words_at(keys[1], i + v / 2 * PANEL, d);
        return v % 2 ? paired<1>(a, b, ALL) : paired<0>(a, b, ALL);
    }
};

static inline int64_t padded_head(int64_t d) { return (d + PANEL - 1) / PANEL * PANEL; }

template <class Kind, class T>
static void pack_keys(const T* const* rows, const T* const* next, int64_t d, typename Kind::Word* keys) {
    using F = Factors<Kind, T>;
    for (int j = 0; j < CUT; j += LANES) {
        auto* at = keys + j / PANEL * (padded_head(d) * F::PARTS / F::PER_WORD) * PANEL + j % PANEL;
        for (int key = 0; key < LANES; key++) prefetch_row(next[j + key], d);
        for (int64_t i = 0; i < d; i += LANES * F::PER_WORD, at += LANES * F::PARTS * PANEL) {
            vu square[LANES];
#pragma GCC unroll 16
            for (int key = 0; key < LANES; key++) square[key] = words_at(rows[j + key], i, d);
            transpose(square);
#pragma GCC unroll 16
            for (int w = 0; w < LANES; w++)
                for (int part = 0; part < F::PARTS; part++) store(at + (w * F::PARTS + part) * PANEL, F::part(square[w], part));
        }
    }
}

template <class Kind, class T>
static void pack_values(const T* const* rows, const T* const* next, int64_t d, typename Kind::Word* values) {
    using F = Factors<Kind, T>;
    for (int j = 0; j < CUT; j += F::KEYS, values += PANEL) {
        for (int key = j; key < j + F::KEYS; key++) prefetch_row(next[key], d);
        auto* at = values;
        for (int64_t i = 0; i < d; i += PANEL, at += CUT / F::KEYS * PANEL)
            for (int v = 0; v < 2; v++) store(at + v * LANES, F::value(rows + j, int(i), v, int(d)));
    }
}

// Whether no element of a cut is NaN or infinity.
template <class T>
static bool finite(const T* const* rows, int64_t d) {
    vf none{};
    for (int j = 0; j < CUT; j++)
        for (int i = 0; i < d; i += LANES) none = madd(load_at(rows[j], i, int(d)), vf{}, none);
    return sum(none) == 0.0f;
}
