// The rows of a piece over one cut of their keys: scores, weights, weighted values.
//
// Knows neither where the pages are nor what other cuts gave. Where the CPU multiplies pairs of bf16 and both queries and
// cache are bf16 (DotPairs), scores and weighted values are sums of pairs, and weights are rounded to bf16. Rows go tile by
// tile from scores to weighted values, so that what lies between stays in the first cache.
#pragma once
#include "few_rows.h"
#include "partials.h"
#include "soften.h"
#include "workspace.h"

// What a thread keeps while it walks through the cuts of a piece.
struct Scratch {
    float *q, *keys, *values;  // factors: [padded d][rows] of every tile; panels
    bf16* wide;                // [2][CUT][padded d]: keys and values of a quantised cache
    float* s;                  // [MAX_ROWS][CUT]: scores, then weights as factors, at the beginning of their row
    Partial state, part;       // of all rows; of a tile over one cut
    float* saved;              // partials of a piece that another thread began
    Span seen[BLOCK_ROWS];
    Range range[BLOCK_ROWS];

    Scratch(const Problem& p, int64_t saved_floats) {
        static thread_local Workspace workspace;
        int64_t width = padded_head(p.d), all = partial_floats(p, BLOCK_ROWS), tile = partial_floats(p, MAX_ROWS);
        q = workspace.get<float>((BLOCK_ROWS + 3 * CUT) * width + MAX_ROWS * CUT + all + tile + saved_floats);
        keys = q + BLOCK_ROWS * width;
        values = keys + CUT * width;
        wide = reinterpret_cast<bf16*>(values + CUT * width);
        s = values + 2 * CUT * width;
        state = partial_at(p, BLOCK_ROWS, s + MAX_ROWS * CUT);
        part = partial_at(p, MAX_ROWS, s + MAX_ROWS * CUT + all);
        saved = s + MAX_ROWS * CUT + all + tile;
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

// One cut of a piece's keys and values, and what its rows make of it.
template <class Kind, class T>
class CutOfPiece {
public:
    // Asks for the rows of `next` meanwhile.
    CutOfPiece(const Problem& p, const Piece& piece, int64_t cut, const CutRows<T>& here, const CutRows<T>& next,
               Scales scales, Scratch& x)
        : p(p), piece(piece), here(here), next(next), scales(scales), x(x) {
        bool masked = false;
        for (int r = 0; r < piece.rows; r++) {
            int first = int(std::clamp<int64_t>(x.seen[r].first - cut * CUT, 0, CUT));
            x.range[r] = {first, int(std::clamp<int64_t>(x.seen[r].last - cut * CUT, first, CUT))};
            masked |= !x.range[r].whole();
        }
        if (few()) return;
        pack_keys<Kind>(here.k, next.k, p.d, factors<Kind>(x.keys));
        pack_values<Kind>(here.v, next.v, p.d, factors<Kind>(x.values));
        shared = !masked || finite(here.v, p.d);
    }

    // Rows [row, row + rows), a tile.
    void attend(int row, int rows, Partial out) const {
        Range all = x.range[row];
        bool whole = all.whole();
        for (int r = row + 1; r < row + rows; r++) {
            all = {std::min(all.first, x.range[r].first), std::max(all.last, x.range[r].last)};
            whole &= x.range[r].whole();
        }
        if (all.empty()) {
            std::fill_n(out.total, rows, 0.0f);
            return;
        }
        score(row, rows, all.last);
        soften<Kind>(rows, x.s, {p.scale * LOG2_E, scales}, x.range + row, whole, out.top, out.total);
        if (shared)
            weigh(all, rows, factors<Kind>(x.s), out.o);
        else
            weigh_apart(row, rows, out.o);
    }

private:
    using F = Factors<Kind, T>;
    using Word = typename Kind::Word;
    const Problem& p;
    const Piece& piece;
    const CutRows<T>&here, &next;
    Scales scales;
    Scratch& x;
    bool shared = false;  // a weight of zero may meet any of the values: none is NaN

    bool few() const { return piece.rows <= MAX_ROWS; }

    void score(int row, int rows, int end) const {  // beyond `end` no row sees a key
        if (few()) return few_rows<Kind, T>(rows).scores(here.k, next.k, p.d, factors<Kind>(x.q), x.s);
        int64_t row_words = padded_head(p.d) * F::PARTS / F::PER_WORD, steps = (p.d * F::PARTS + F::PER_WORD - 1) / F::PER_WORD;
        interleaved_tile<Kind>(rows)(factors<Kind>(x.q) + row * row_words, factors<Kind>(x.keys), row_words * PANEL,
                                     (end + PANEL - 1) / PANEL, int(steps), x.s, CUT);
    }

    void weigh(Range range, int rows, const Word* weights, float* o) const {
        int first = range.first / F::KEYS, last = (range.last + F::KEYS - 1) / F::KEYS;
        int64_t width = padded_head(p.d);
        strided_tile<Kind, CUT>(rows)(weights + first, factors<Kind>(x.values) + first * PANEL, CUT / F::KEYS * PANEL,
                                      int(width / PANEL), last - first, o, width);
    }

    // The rows of each range meet the values of that range alone, zeros elsewhere.
    void weigh_apart(int row, int rows, float* o) const {
        const T* values[CUT];
        int64_t width = padded_head(p.d);
        for (int r = 0, end; r < rows; r = end) {
            Range range = x.range[row + r];
            for (end = r + 1; end < rows && x.range[row + end] == range;) end++;
            std::fill_n(values, CUT, zeros<T>);
            std::copy(here.v + range.first, here.v + range.last, values + range.first);
            const Word* weights = factors<Kind>(x.s + r * CUT);
            if (few()) {
                few_rows<Kind, T>(end - r).values(values, next.v, range.first / F::KEYS, (range.last + F::KEYS - 1) / F::KEYS,
                                                  p.d, weights, o + r * width, width);
            } else {
                pack_values<Kind>(values, values, p.d, factors<Kind>(x.values));
                weigh(range, end - r, weights, o + r * width);
            }
        }
    }
};
