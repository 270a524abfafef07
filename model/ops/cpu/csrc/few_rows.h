// A cut against few rows, straight from the pages: every key and value is read once, widened in registers, for all rows.
//
// Knows pages, not queries. Adds in the order of tile() over packed panels, so both give the same bits: a score runs
// through the dimensions from zero, a weighted value through the keys.
#pragma once
#include "kv_cut.h"

// The dimensions that one word of a row holds, as floats.
template <class T>
static inline void widen_word(vu word, vf (&out)[4 / sizeof(T)]) {
    if constexpr (sizeof(T) == 4) {
        out[0] = (vf)word;
    } else {
        out[0] = (vf)(word << 16);
        out[1] = (vf)(word & 0xffff0000u);
    }
}

// Dimensions [i, i + LANES * 4 / sizeof(T)) of LANES keys join their scores; q: [dimension][ROWS] from i on. WHOLE: they
// are all below d.
template <int ROWS, bool WHOLE, class T>
static inline void add_scores(const T* const* keys, int64_t i, int64_t d, const float* q, float* s) {
    constexpr int PER_WORD = 4 / sizeof(T);
    vu square[LANES];
#pragma GCC unroll 16
    for (int key = 0; key < LANES; key++) square[key] = WHOLE ? load<vu>(keys[key] + i) : words_at(keys[key], i, d);
    transpose(square);
    vf acc[ROWS];
    for (int r = 0; r < ROWS; r++) acc[r] = i ? load<vf>(s + r * CUT) : vf{};
#pragma GCC unroll 16
    for (int w = 0; w < LANES; w++) {
        vf dimension[PER_WORD];
        widen_word<T>(square[w], dimension);
        for (int half = 0; half < PER_WORD; half++)
            for (int r = 0; r < ROWS; r++)
                acc[r] = madd(dimension[half], splat(q[(w * PER_WORD + half) * ROWS + r]), acc[r]);
    }
    for (int r = 0; r < ROWS; r++) store(s + r * CUT, acc[r]);
}

// s [ROWS][CUT] = keys times queries; q: [padded d][ROWS], zeros from d on.
template <int ROWS, class T>
__attribute__((noinline)) static void scores_of_few(const T* const* keys, const T* const* next, int64_t d,
                                                    const float* q, float* s) {
    for (int64_t i = 0; i < d; i += LANES * 4 / int64_t(sizeof(T)))
        for (int j = 0; j < CUT; j += LANES) {
            for (int key = j; key < j + LANES; key++) __builtin_prefetch(next[key] + i, 0, 3);
            if (i + LANES * 4 / int64_t(sizeof(T)) <= d)
                add_scores<ROWS, true>(keys + j, i, d, q + i * ROWS, s + j);
            else
                add_scores<ROWS, false>(keys + j, i, d, q + i * ROWS, s + j);
        }
}

// acc[r][v] += value(v) * weight(r). The fewer are kept in registers, so that the accumulators need not leave theirs.
template <int ROWS, int VECTORS, class Value, class Weight>
static inline void add_weighted(Value value, Weight weight, vf (&acc)[ROWS][VECTORS]) {
    vf kept[ROWS < VECTORS ? ROWS : VECTORS];
#pragma GCC unroll 12
    for (int i = 0; i < int(sizeof kept / sizeof(vf)); i++) kept[i] = ROWS < VECTORS ? weight(i) : value(i);
#pragma GCC unroll 12
    for (int j = 0; j < (ROWS < VECTORS ? VECTORS : ROWS); j++) {
        vf other = ROWS < VECTORS ? value(j) : weight(j);
#pragma GCC unroll 12
        for (int i = 0; i < int(sizeof kept / sizeof(vf)); i++) {
            vf& to = ROWS < VECTORS ? acc[i][j] : acc[j][i];
            to = madd(kept[i], other, to);
        }
    }
}

// Vectors [i, i + VECTORS) of the weighted sum of `keys` values; weights s, rows CUT apart; o rows `width` apart.
template <int ROWS, int VECTORS, class T>
static inline void add_values(const T* const* values, const T* const* next, int keys, int i, int d, const float* s,
                              float* o, int64_t width) {
    vf acc[ROWS][VECTORS] = {};
    for (int j = 0; j < keys; j++) {
        __builtin_prefetch(next[j] + i, 0, 3);
        auto value = [&](int v) { return VECTORS == 1 ? load_at(values[j], i, d) : load_f32(values[j] + i + v * LANES); };
        add_weighted<ROWS, VECTORS>(value, [&](int r) { return splat(s[r * CUT + j]); }, acc);
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 12
        for (int v = 0; v < VECTORS; v++) store(o + r * width + i + v * LANES, acc[r][v]);
}

// o [ROWS][width] = the sum of keys [0, keys) weighted by s.
template <int ROWS, class T>
__attribute__((noinline)) static void values_of_few(const T* const* values, const T* const* next, int keys,
                                                    int64_t d, const float* s, float* o, int64_t width) {
    constexpr int VECTORS = ROWS == 1 ? 8 : MAX_ROWS * 2 / ROWS;
    int i = 0;
    for (; i + VECTORS * LANES <= d; i += VECTORS * LANES)
        add_values<ROWS, VECTORS>(values, next, keys, i, int(d), s, o, width);
    for (; i < width; i += LANES) add_values<ROWS, 1>(values, next, keys, i, int(d), s, o, width);
}

// ---- choosing the number of rows at run time -------------------------------------------------------------------------
template <class T>
struct FewRows {
    void (*scores)(const T* const*, const T* const*, int64_t, const float*, float*);
    void (*values)(const T* const*, const T* const*, int, int64_t, const float*, float*, int64_t);
};

template <class T, int ROWS = MAX_ROWS>
static FewRows<T> few_rows(int rows) {
    if (rows == ROWS) return {scores_of_few<ROWS, T>, values_of_few<ROWS, T>};
    if constexpr (ROWS > 1) return few_rows<T, ROWS - 1>(rows);
    return {};
}
