// One cut of a sequence's keys and values, gathered from its pages into the panels that tile() reads.
//
// Knows pages, not queries. Keys become [CUT / PANEL][d][PANEL] (a lane is a key), values [d / PANEL][CUT][PANEL]
// (a lane is a dimension), all floats. Tokens outside [first, last) are zeros, whatever their slots hold.
#pragma once
#include <algorithm>
#include <utility>

#include "tile.h"

constexpr int CUT = 64;  // KV_CUT of model/ops/interface.py

// Where the rows of a cut lie; a row of zeros for a token that is not to be read.
template <class T>
struct CutRows {
    const T *k[CUT], *v[CUT];
};

template <class T>
struct Pages {
    const T *k, *v;        // [num_pages, kv_heads, page_size, d], pages page_stride elements apart
    const int32_t* table;  // the pages of one sequence
    int64_t page_stride, page_size, d;

    // The rows of tokens [start, start + CUT) of one head that are in [first, last).
    void find(int64_t kv_head, int64_t start, int64_t first, int64_t last, CutRows<T>& out) const {
        static const T zeros[MAX_HEAD] = {};
        int from = int(std::clamp<int64_t>(first - start, 0, CUT)), to = int(std::clamp<int64_t>(last - start, from, CUT));
        std::fill(out.k, out.k + from, zeros), std::fill(out.v, out.v + from, zeros);
        for (int j = from; j < to;) {
            int64_t offset = (start + j) % page_size, run = std::min<int64_t>(page_size - offset, to - j);
            int64_t at = table[(start + j) / page_size] * page_stride + (kv_head * page_size + offset) * d;
            for (; run > 0; run--, j++, at += d) out.k[j] = k + at, out.v[j] = v + at;
        }
        std::fill(out.k + to, out.k + CUT, zeros), std::fill(out.v + to, out.v + CUT, zeros);
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
    if constexpr (H < LANES) {
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (!(i & H)) exchange<H>(v[i], v[i + H], std::make_integer_sequence<int, LANES>());
        transpose<2 * H>(v);
    }
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

// A word of LANES keys -> one dimension of floats, or two of bf16.
static inline void put_word(vu word, float* at, const float*) { store(at, word); }

static inline void put_word(vu word, float* at, const bf16*) {
    store(at, word << 16);
    store(at + PANEL, word & 0xffff0000u);
}

static inline int64_t padded_head(int64_t d) { return (d + PANEL - 1) / PANEL * PANEL; }

template <class T>
static void pack_keys(const T* const* rows, const T* const* next, int64_t d, float* keys) {
    constexpr int PER_WORD = 4 / sizeof(T);
    for (int j = 0; j < CUT; j += LANES) {
        for (int key = 0; key < LANES; key++) prefetch_row(next[j + key], d);
        for (int64_t i = 0; i < d; i += LANES * PER_WORD) {
            vu square[LANES];
#pragma GCC unroll 16
            for (int key = 0; key < LANES; key++) square[key] = words_at(rows[j + key], i, d);
            transpose(square);
            float* at = keys + j / PANEL * padded_head(d) * PANEL + i * PANEL + j % PANEL;
#pragma GCC unroll 16
            for (int w = 0; w < LANES; w++) put_word(square[w], at + w * PER_WORD * PANEL, rows[0]);
        }
    }
}

template <class T>
static void pack_values(const T* const* rows, const T* const* next, int64_t d, float* values) {
    for (int j = 0; j < CUT; j++) {
        prefetch_row(next[j], d);
        const T* row = rows[j];
        float* at = values + int64_t(j) * PANEL;
        int64_t i = 0;
        for (; i + PANEL <= d; i += PANEL, at += CUT * PANEL) {
            store(at, load_f32(row + i));
            store(at + LANES, load_f32(row + i + LANES));
        }
        if (i < d) {
            store(at, load_at(row, int(i), int(d)));
            store(at + LANES, load_at(row, int(i) + LANES, int(d)));
        }
    }
}
