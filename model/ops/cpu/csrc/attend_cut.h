// The rows of a piece over one cut of their keys: scores, weights, weighted values.
//
// Knows neither where the pages are nor how cuts are merged. Where the CPU multiplies pairs of bf16 and both queries and cache
// are bf16 (DotPairs), scores and weighted values are sums of pairs, and weights are rounded to bf16.
#pragma once
#include "few_rows.h"
#include "partials.h"
#include "workspace.h"

constexpr float LOG2_E = 1.44269504088896341f;

struct Range {  // keys of a cut
    int first, last;
    bool whole() const { return first == 0 && last == CUT; }
};

// What a thread keeps while it walks through the cuts of a piece.
struct Scratch {
    float *q, *panels;  // factors: [padded d][rows] of every tile; keys, then values: together they would not fit in L1
    float* s;           // [BLOCK_ROWS][CUT]: scores, then weights as factors, at the beginning of their row
    Partial state, part;
    float* saved;  // partials of a piece that another thread began
    Span seen[BLOCK_ROWS];
    Range range[BLOCK_ROWS];

    Scratch(const Problem& p, int64_t saved_floats) {
        static thread_local Workspace workspace;
        int64_t width = padded_head(p.d), each = partial_floats(p, BLOCK_ROWS);
        q = workspace.get<float>(BLOCK_ROWS * width + CUT * width + BLOCK_ROWS * CUT + 2 * each + saved_floats);
        panels = q + BLOCK_ROWS * width;
        s = panels + CUT * width;
        state = partial_at(p, BLOCK_ROWS, s + BLOCK_ROWS * CUT);
        part = partial_at(p, BLOCK_ROWS, s + BLOCK_ROWS * CUT + each);
        saved = s + BLOCK_ROWS * CUT + 2 * each;
    }
};

// Calls body(first row, rows) for every tile of the piece.
template <class Body>
static void each_tile(const Piece& piece, Body body) {
    int count = int(piece.rows);
    for (int t = 0; t < tile_count(count); t++) body(tile_start(count, t), tile_start(count, t + 1) - tile_start(count, t));
}

template <class Kind>
static typename Kind::Word* factors(float* of) {
    return reinterpret_cast<typename Kind::Word*>(of);
}

static inline void store_weight(float* s, int j, vf weight, float) { store(s + j, weight); }
static inline void store_weight(float* s, int j, vf weight, uint32_t) { store(reinterpret_cast<bf16*>(s) + j, rounded(weight)); }

// Scores -> weights 2^(factor * score - top), zero outside the range. MASKED: not every key is inside.
template <class Kind, bool MASKED>
static void soften(float* s, float factor, Range range, float& top, float& total) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    auto seen = [&](int j) { return (lane + j >= range.first) & (lane + j < range.last); };
    int end = MASKED ? range.last : CUT;
    vf best = splat(-__builtin_inff()), acc{};
    for (int j = 0; j < end; j += LANES) {
        vf x = load<vf>(s + j);
        best = (MASKED ? seen(j) & (x > best) : x > best) ? x : best;
    }
    const float highest = largest(best) * factor;
#pragma GCC unroll 4
    for (int j = 0; j < end; j += LANES) {
        vf weight = exp2_of<true>(load<vf>(s + j) * factor - highest);
        if (MASKED) weight = seen(j) ? weight : vf{};
        store_weight(s, j, weight, typename Kind::Word());
        acc += weight;
    }
    top = highest, total = sum(acc);
}

template <class Kind, class KV>
static void score(const Problem& p, const Piece& piece, const CutRows<KV>& here, const CutRows<KV>& next, Scratch& x) {
    using F = Factors<Kind, KV>;
    int64_t row_words = padded_head(p.d) * F::PARTS / F::PER_WORD, steps = (p.d * F::PARTS + F::PER_WORD - 1) / F::PER_WORD;
    auto *q = factors<Kind>(x.q), *panels = factors<Kind>(x.panels);
    if (piece.rows <= MAX_ROWS) {
        few_rows<Kind, KV>(int(piece.rows)).scores(here.k, next.k, p.d, q, x.s);
        return;
    }
    pack_keys<Kind>(here.k, next.k, p.d, panels);
    each_tile(piece, [&](int row, int rows) {
        int count = (x.range[row + rows - 1].last + PANEL - 1) / PANEL;  // beyond, no row of the tile sees a key
        interleaved_tile<Kind>(rows)(q + row * row_words, panels, row_words * PANEL, count, int(steps), x.s + row * CUT, CUT);
    });
}

// Weighted values of rows with one range. Where a step takes two keys and only one of them is in the range, the other is
// zeros meanwhile: a weight of zero never meets a value the rows must not see.
template <class Kind, class KV>
class Weighing {
public:
    Weighing(const Problem& p, const CutRows<KV>& here, const CutRows<KV>& next, bool few, float* panels)
        : p(p), here(here), next(next), few(few), panels(factors<Kind>(panels)) {
        std::copy(here.v, here.v + CUT, values);
        if (!few) pack_values<Kind>(values, next.v, p.d, this->panels);
    }

    void operator()(Range range, int rows, const float* s, float* o) {
        bool before = range.first % KEYS, after = range.last % KEYS;
        if (before) put(range.first - 1, zeros<KV>);
        if (after) put(range.last, zeros<KV>);
        add(range.first / KEYS, (range.last + KEYS - 1) / KEYS, rows, reinterpret_cast<const typename Kind::Word*>(s), o);
        if (before) put(range.first - 1, here.v[range.first - 1]);
        if (after) put(range.last, here.v[range.last]);
    }

private:
    static constexpr int KEYS = Factors<Kind, KV>::KEYS;
    const Problem& p;
    const CutRows<KV>&here, &next;
    bool few;
    typename Kind::Word* panels;
    const KV* values[CUT];

    void put(int key, const KV* row) {
        values[key] = row;
        if (!few) pack_step<Kind>(values + key / KEYS * KEYS, p.d, panels + key / KEYS * PANEL);
    }

    void add(int first, int last, int rows, const typename Kind::Word* weights, float* o) const {
        int64_t width = padded_head(p.d);
        if (few)
            few_rows<Kind, KV>(rows).values(values, next.v, first, last, p.d, weights, o, width);
        else
            strided_tile<Kind, CUT>(rows)(weights + first, panels + first * PANEL, CUT / KEYS * PANEL, int(width / PANEL),
                                          last - first, o, width);
    }
};

template <class Kind, class KV>
static void weigh(const Problem& p, const Piece& piece, const CutRows<KV>& here, const CutRows<KV>& next, Scratch& x,
                  float* o) {
    Weighing<Kind, KV> weighing(p, here, next, piece.rows <= MAX_ROWS, x.panels);
    each_tile(piece, [&](int row, int rows) {
        for (int r = row, end; r < row + rows; r = end) {
            Range range = x.range[r];
            for (end = r + 1; end < row + rows && x.range[end].last == range.last && x.range[end].first == range.first;) end++;
            weighing(range, end - r, x.s + r * CUT, o + r * padded_head(p.d));
        }
    });
}

template <class Kind, class KV>
static void attend_cut(const Problem& p, const Piece& piece, int64_t cut, const CutRows<KV>& here, const CutRows<KV>& next,
                       Scratch& x, Partial out) {
    for (int r = 0; r < piece.rows; r++) {
        int first = int(std::clamp<int64_t>(x.seen[r].first - cut * CUT, 0, CUT));
        x.range[r] = {first, int(std::clamp<int64_t>(x.seen[r].last - cut * CUT, first, CUT))};
    }
    score<Kind>(p, piece, here, next, x);
    for (int r = 0; r < piece.rows; r++) {
        auto soft = x.range[r].whole() ? soften<Kind, false> : soften<Kind, true>;
        soft(x.s + r * CUT, p.scale * LOG2_E, x.range[r], out.top[r], out.total[r]);
    }
    weigh<Kind>(p, piece, here, next, x, out.o);
}
