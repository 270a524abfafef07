// A cut against few rows, straight from the pages: every key and value is read once, turned in registers, for all rows.
//
// Knows pages, not queries. Adds in the order of tile() over packed panels, so both give the same bits: a score runs
// through the dimensions from zero, a weighted value through the keys.
#pragma once
#include "kv_cut.h"

// The dimensions that LANES words from i on hold join the scores of LANES keys; q: [part][ROWS] from there on. WHOLE: they
// are all below d.
template <class Kind, int ROWS, bool WHOLE, class T>
static inline void add_scores(const T* const* keys, int64_t i, int64_t d, const typename Kind::Word* q, float* s) {
    using F = Factors<Kind, T>;
    vu square[LANES];
#pragma GCC unroll 16
    for (int key = 0; key < LANES; key++) square[key] = WHOLE ? load<vu>(keys[key] + i) : words_at(keys[key], i, d);
    transpose(square);
    vf acc[ROWS];
    for (int r = 0; r < ROWS; r++) acc[r] = i ? load<vf>(s + r * CUT) : vf{};
#pragma GCC unroll 16
    for (int w = 0; w < LANES; w++)
        for (int part = 0; part < F::PARTS; part++) {
            auto factor = F::part(square[w], part);
            for (int r = 0; r < ROWS; r++)
                acc[r] = Kind::dot(factor, Kind::spread(q[(w * F::PARTS + part) * ROWS + r]), acc[r]);
        }
    for (int r = 0; r < ROWS; r++) store(s + r * CUT, acc[r]);
}

// s [ROWS][CUT] = keys times queries; q: [parts of padded d][ROWS], zeros from d on.
template <class Kind, int ROWS, class T>
__attribute__((noinline)) static void scores_of_few(const T* const* keys, const T* const* next, int64_t d,
                                                    const typename Kind::Word* q, float* s) {
    using F = Factors<Kind, T>;
    for (int64_t i = 0; i < d; i += LANES * F::PER_WORD, q += LANES * F::PARTS * ROWS)
        for (int j = 0; j < CUT; j += LANES) {
            for (int key = j; key < j + LANES; key++) __builtin_prefetch(next[key] + i, 0, 2);
            if (i + LANES * F::PER_WORD <= d)
                add_scores<Kind, ROWS, true>(keys + j, i, d, q, s + j);
            else
                add_scores<Kind, ROWS, false>(keys + j, i, d, q, s + j);
        }
}

// acc[r][v] += value(v) * weight(r). The fewer are kept in registers, so that the accumulators need not leave theirs.
template <class Kind, int ROWS, int VECTORS, class Value, class Weight>
static inline void add_weighted(Value value, Weight weight, vf (&acc)[ROWS][VECTORS]) {
    decltype(value(0)) kept[ROWS < VECTORS ? ROWS : VECTORS];
#pragma GCC unroll 12
    for (int i = 0; i < int(sizeof kept / sizeof(vf)); i++) kept[i] = ROWS < VECTORS ? weight(i) : value(i);
#pragma GCC unroll 12
    for (int j = 0; j < (ROWS < VECTORS ? VECTORS : ROWS); j++) {
        auto other = ROWS < VECTORS ? value(j) : weight(j);
#pragma GCC unroll 12
        for (int i = 0; i < int(sizeof kept / sizeof(vf)); i++) {
            vf& to = ROWS < VECTORS ? acc[i][j] : acc[j][i];
            to = Kind::dot(kept[i], other, to);
        }
    }
}

// VECTORS vectors from dimension i on of the weighted sum of steps [first, last); weights s, rows CUT apart; o rows
// `width` apart.
template <class Kind, int ROWS, int VECTORS, class T>
static inline void add_values(const T* const* values, const T* const* next, int first, int last, int i, int d,
                              const typename Kind::Word* s, float* o, int64_t width) {
    using F = Factors<Kind, T>;
    vf acc[ROWS][VECTORS] = {};
    for (int step = first; step < last; step++) {
        for (int key = step * F::KEYS; key < (step + 1) * F::KEYS; key++)
            for (int line = 0; line < VECTORS * LANES; line += 64 / sizeof(T)) __builtin_prefetch(next[key] + i + line, 0, 2);
        add_weighted<Kind, ROWS, VECTORS>([&](int v) { return F::value(values + step * F::KEYS, i, v, d); },
                                          [&](int r) { return Kind::spread(s[r * CUT + step]); }, acc);
    }
#pragma GCC unroll 12
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 12
        for (int v = 0; v < VECTORS; v++) store(o + r * width + i + v * LANES, acc[r][v]);
}

// o [ROWS][width] = the sum of the keys of steps [first, last) weighted by s.
template <class Kind, int ROWS, class T>
__attribute__((noinline)) static void values_of_few(const T* const* values, const T* const* next, int first, int last,
                                                    int64_t d, const typename Kind::Word* s, float* o, int64_t width) {
    constexpr int VECTORS = ROWS * 4 <= MAX_ROWS * 2 ? 4 : 2;
    int i = 0;
    for (; i + VECTORS * LANES <= width; i += VECTORS * LANES)
        add_values<Kind, ROWS, VECTORS>(values, next, first, last, i, int(d), s, o, width);
    if (i < width) add_values<Kind, ROWS, 2>(values, next, first, last, i, int(d), s, o, width);
}

// ---- choosing the number of rows at run time -------------------------------------------------------------------------
template <class Kind, class T>
struct FewRows {
    using Word = typename Kind::Word;
    void (*scores)(const T* const*, const T* const*, int64_t, const Word*, float*);
    void (*values)(const T* const*, const T* const*, int, int, int64_t, const Word*, float*, int64_t);
};

template <class Kind, class T, int ROWS = MAX_ROWS>
static FewRows<Kind, T> few_rows(int rows) {
    if (rows == ROWS) return {scores_of_few<Kind, ROWS, T>, values_of_few<Kind, ROWS, T>};
    if constexpr (ROWS > 1) return few_rows<Kind, T, ROWS - 1>(rows);
    return {};
}
