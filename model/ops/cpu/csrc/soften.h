// From scores of a cut to weights: powers of 2 of what they are below the largest that the row sees.
//
// Knows neither keys nor values. Weights become the factors of a Kind in place, at the beginning of their row.
#pragma once
#include "scaled_cut.h"

constexpr float LOG2_E = 1.44269504088896341f;

struct Range {  // keys of a cut
    int first, last;

    bool empty() const { return first == last; }
    bool whole() const { return first == 0 && last == CUT; }
    bool operator==(Range other) const { return first == other.first && last == other.last; }
};

static inline void store_weight(float* s, int j, vf weight, float) { store(s + j, weight); }
static inline void store_weight(float* s, int j, vf weight, uint32_t) { store(reinterpret_cast<bf16*>(s) + j, rounded(weight)); }

static inline vf larger(vf x, vf y) {  // y where one of them is NaN
#if defined(__AVX512F__)
    return _mm512_max_ps(x, y);
#else
    return x > y ? x : y;
#endif
}

// What rows of a tile have in common. Scores and weights lie in s [rows][CUT]; beyond the range anything may stand there.
struct Softening {
    float factor;   // of the scores, in powers of 2
    Scales scales;  // of keys and values
};

template <bool SCALED>
static inline vf score_at(const float* s, int j, Scales scales) {
    return SCALED ? load<vf>(s + j) * load<vf>(scales.k + j) : load<vf>(s + j);
}

static inline auto seen(int j, Range range) {  // lanes whose keys are in the range
    vi key;
    for (int i = 0; i < LANES; i++) key[i] = i + j;
    return (key >= range.first) & (key < range.last);
}

template <bool MASKED, bool SCALED>
static inline vf best_of(const float* s, const Softening& how, Range range) {
    const vf nothing = splat(-__builtin_inff());
    vf best = nothing;
#pragma GCC unroll 4
    for (int j = 0; j < CUT; j += LANES) {
        vf score = score_at<SCALED>(s, j, how.scales);
        best = larger(MASKED ? (seen(j, range) ? score : nothing) : score, best);
    }
    return best;
}

// Scores -> weights 2^(factor * score - top), zero outside the range, times the scales of their values, if they have any.
// Returns the sum of the weights, before the scales.
template <class Kind, bool MASKED, bool SCALED>
static inline vf weigh_row(float* s, const Softening& how, Range range, float top) {
    vf total{};
#pragma GCC unroll 4
    for (int j = 0; j < CUT; j += LANES) {
        vf weight = exp2_of<true>(score_at<SCALED>(s, j, how.scales) * how.factor - top);
        if (MASKED) weight = seen(j, range) ? weight : vf{};
        total += weight;
        if (SCALED) weight *= load<vf>(how.scales.v + j);
        if (SCALED && MASKED) weight = seen(j, range) ? weight : vf{};  // a scale may be NaN
        store_weight(s, j, weight, typename Kind::Word());
    }
    return total;
}

// Row after row in three walks: within each, rows do not wait for one another. MASKED: not every row sees every key.
template <class Kind, bool MASKED, bool SCALED>
__attribute__((noinline)) static void soften_rows(int rows, float* s, const Softening& how, const Range* range, float* top,
                                                  float* total) {
    vf best[MAX_ROWS], sums[MAX_ROWS];
    for (int r = 0; r < rows; r++) best[r] = best_of<MASKED, SCALED>(s + r * CUT, how, range[r]);
    for (int r = 0; r < rows; r++) top[r] = largest(best[r]) * how.factor;
    for (int r = 0; r < rows; r++) sums[r] = weigh_row<Kind, MASKED, SCALED>(s + r * CUT, how, range[r], top[r]);
    for (int r = 0; r < rows; r++) total[r] = sum(sums[r]);
}

// whole: every row sees every key.
template <class Kind>
static void soften(int rows, float* s, const Softening& how, const Range* range, bool whole, float* top, float* total) {
    auto masked = how.scales.k ? soften_rows<Kind, true, true> : soften_rows<Kind, true, false>;
    auto open = how.scales.k ? soften_rows<Kind, false, true> : soften_rows<Kind, false, false>;
    (whole ? open : masked)(rows, s, how, range, top, total);
}
