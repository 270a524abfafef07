// Paged attention with grouped heads: decode, chunks of prompts and mixed batches are one case.
//
// Knows no layers. A row is one query head of one token. Keys are cut at multiples of CUT tokens of their sequence; a row's
// cuts are computed apart (maximum, sum, weighted values) and merged in index order. Who computes which rows and which
// cuts does not change a bit, so decode equals prefill and any chunking. Where the CPU multiplies pairs of bf16 and both
// queries and cache are bf16, scores and weighted values are sums of pairs, and weights are rounded to bf16.
#include <omp.h>

#include <type_traits>

#include "attention_work.h"
#include "few_rows.h"
#include "operations.h"
#include "workspace.h"

namespace {

constexpr float LOG2_E = 1.44269504088896341f;

template <class Q, class KV>
using KindOf = std::conditional_t<HAS_BF16_DOT && std::is_same_v<Q, bf16> && std::is_same_v<KV, bf16>, DotPairs, Floats>;

struct Partial {
    float *o, *top, *total;  // [rows][padded d], [rows], [rows]
};

size_t partial_floats(const Problem& p, int64_t rows) { return rows * (padded_head(p.d) + 2); }

Partial partial_at(const Problem& p, int64_t rows, float* at) {
    float* top = at + rows * padded_head(p.d);
    return {at, top, top + rows};
}

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
void each_tile(const Piece& piece, Body body) {
    int count = int(piece.rows);
    for (int t = 0; t < tile_count(count); t++) body(tile_start(count, t), tile_start(count, t + 1) - tile_start(count, t));
}

template <class Kind>
typename Kind::Word* factors(float* of) {
    return reinterpret_cast<typename Kind::Word*>(of);
}

// ---- one cut of a piece ----------------------------------------------------------------------------------------------
inline void store_weight(float* s, int j, vf weight, float) { store(s + j, weight); }
inline void store_weight(float* s, int j, vf weight, uint32_t) { store(reinterpret_cast<bf16*>(s) + j, rounded(weight)); }

// Scores -> weights 2^(factor * score - top), zero outside the range. MASKED: not every key is inside.
template <class Kind, bool MASKED>
void soften(float* s, float factor, Range range, float& top, float& total) {
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
void score(const Problem& p, const Piece& piece, const CutRows<KV>& here, const CutRows<KV>& next, Scratch& x) {
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
void weigh(const Problem& p, const Piece& piece, const CutRows<KV>& here, const CutRows<KV>& next, Scratch& x, float* o) {
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
void compute(const Problem& p, const Piece& piece, int64_t cut, const CutRows<KV>& here, const CutRows<KV>& next,
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

// ---- merging ---------------------------------------------------------------------------------------------------------
void merge(const Problem& p, int64_t rows, Partial into, Partial from) {
    int64_t width = padded_head(p.d);
    for (int64_t r = 0; r < rows; r++) {
        if (from.total[r] == 0.0f) continue;  // nothing visible in this cut
        float top = std::max(into.top[r], from.top[r]);
        vf keep = exp2_of<true>(splat(into.top[r] - top)), take = exp2_of<true>(splat(from.top[r] - top));
        into.top[r] = top;
        into.total[r] = madd(splat(from.total[r]), take, splat(into.total[r]) * keep)[0];
        for (int64_t i = r * width; i < (r + 1) * width; i += LANES)
            store(into.o + i, madd(load<vf>(from.o + i), take, load<vf>(into.o + i) * keep));
    }
}

void clear(const Problem& p, int64_t rows, Partial state) {
    std::fill_n(state.o, rows * padded_head(p.d), 0.0f);
    std::fill_n(state.top, rows, -__builtin_inff());
    std::fill_n(state.total, rows, 0.0f);
}

int64_t head_index(const Problem& p, const Piece& piece, int64_t r) {  // of row r in [T, q_heads]
    int64_t row = piece.row + r;
    return (p.q_starts[piece.sequence] + row / p.group()) * p.q_heads + piece.kv_head * p.group() + row % p.group();
}

template <class Q>
void write_out(const Problem& p, const Piece& piece, Partial state, Q* out) {
    int64_t width = padded_head(p.d);
    for (int64_t r = 0; r < piece.rows; r++) {
        Q* row = out + head_index(p, piece, r) * p.d;
        float inverse = state.total[r] == 0.0f ? 0.0f : 1.0f / state.total[r];
        for (int i = 0; i < p.d; i += LANES) store_at(row, i, int(p.d), load<vf>(state.o + r * width + i) * inverse);
    }
}

// ---- a thread's walk -------------------------------------------------------------------------------------------------
inline void put_query(const bf16* row, int64_t d, int64_t width, int rows, uint32_t* to) {
    for (int64_t i = 0; i < width; i += PANEL) {
        uint32_t words[LANES];
        store(words, i < d ? words_at(row, i, d) : vu{});
        for (int j = 0; j < LANES; j++, to += rows) *to = words[j];
    }
}

template <class Q>
void put_query(const Q* row, int64_t d, int64_t width, int rows, float* to) {
    for (int64_t i = 0; i < width; i += LANES) {
        float values[LANES];
        store(values, load_at(row, int(i), int(d)));
        for (int j = 0; j < LANES; j++, to += rows) *to = values[j];
    }
}

template <class Kind, class Q, class KV>
void pack_queries(const Problem& p, const Piece& piece, const Q* q, Scratch& x) {
    using F = Factors<Kind, KV>;
    int64_t width = padded_head(p.d), row_words = width * F::PARTS / F::PER_WORD;
    each_tile(piece, [&](int start, int rows) {
        for (int r = 0; r < rows; r++) {
            x.seen[start + r] = visible(p, piece, start + r);
            put_query(q + head_index(p, piece, start + r) * p.d, p.d, width, rows, factors<Kind>(x.q) + start * row_words + r);
        }
    });
}

template <class Q, class KV>
struct Tensors {
    const Q* q;
    const KV *k, *v;
    Q* out;
};

// The beginning of a piece that another thread ends, or the end of one that another thread began.
struct Loose {
    size_t piece = SIZE_MAX;
    int64_t cuts = 0;
    float* partials = nullptr;
};

template <class Q, class KV>
class Walk {
public:
    Walk(const Problem& problem, const std::vector<Piece>& pieces, Tensors<Q, KV> tensors, std::vector<Stretch> share)
        : p(problem), pieces(pieces), t(tensors), share(std::move(share)), x(p, saved_floats()) {}

    // Computes the share. Returns what it holds of a piece that another thread began.
    Loose run() {
        CutRows<KV> rows[2];  // this cut's and the next one's
        if (!share.empty()) find(share[0], share[0].from, rows[0]);
        int now = 0;
        for (size_t i = 0; i < share.size(); i++) {
            const Stretch& s = share[i];
            const Piece& piece = pieces[s.piece];
            begin(piece);
            for (int64_t c = s.from; c < s.to; c++, now = 1 - now) {
                bool last = c + 1 == s.to;
                if (!last || i + 1 < share.size())
                    find(last ? share[i + 1] : s, last ? share[i + 1].from : c + 1, rows[1 - now]);
                else
                    rows[1 - now] = rows[now];
                Partial part = starts(s) ? x.part : saved(piece, x.saved, c - s.from);
                compute<Kind>(p, piece, c, rows[now], rows[1 - now], x, part);
                if (starts(s)) merge(p, piece.rows, x.state, part);
            }
            if (starts(s) && s.to == piece.last_cut) write_out(p, piece, x.state, t.out);
        }
        return share.empty() || starts(share[0]) ? Loose{} : Loose{share[0].piece, share[0].to - share[0].from, x.saved};
    }

    // Ends the piece that this thread began and others went on with; ends: of every thread, in order.
    void finish(const std::vector<Loose>& ends) {
        if (share.empty() || !starts(share.back()) || share.back().to == pieces[share.back().piece].last_cut) return;
        const Piece& piece = pieces[share.back().piece];
        for (const Loose& end : ends)
            if (end.piece == share.back().piece)
                for (int64_t c = 0; c < end.cuts; c++) merge(p, piece.rows, x.state, saved(piece, end.partials, c));
        write_out(p, piece, x.state, t.out);
    }

private:
    using Kind = KindOf<Q, KV>;
    const Problem& p;
    const std::vector<Piece>& pieces;
    Tensors<Q, KV> t;
    std::vector<Stretch> share;
    Scratch x;

    bool starts(const Stretch& s) const { return s.from == pieces[s.piece].cut; }

    int64_t saved_floats() const {
        if (share.empty() || starts(share[0])) return 0;
        return (share[0].to - share[0].from) * partial_floats(p, pieces[share[0].piece].rows);
    }

    Partial saved(const Piece& piece, float* partials, int64_t index) const {
        return partial_at(p, piece.rows, partials + index * partial_floats(p, piece.rows));
    }

    void begin(const Piece& piece) {
        pack_queries<Kind, Q, KV>(p, piece, t.q, x);
        clear(p, piece.rows, x.state);
    }

    void find(const Stretch& s, int64_t cut, CutRows<KV>& rows) const {
        const Piece& piece = pieces[s.piece];
        Pages<KV> pages{t.k, t.v, p.page_table + piece.sequence * p.table_width, p.page_stride, p.page_size, p.d};
        pages.find(piece.kv_head, cut * CUT, piece.tokens.first, piece.tokens.last, rows);
    }
};

template <class Q, class KV>
void attention(const Problem& p, int64_t tokens, Tensors<Q, KV> t) {
    std::fill(t.out + p.q_starts[p.sequences] * p.q_heads * p.d, t.out + tokens * p.q_heads * p.d, Q{});
    std::vector<Piece> pieces = pieces_of(p);
    std::vector<Loose> ends(omp_get_max_threads());
#pragma omp parallel if (total_cost(pieces) > PARALLEL_FROM)
    {
        int me = omp_get_thread_num();
        Walk<Q, KV> walk(p, pieces, t, share_of(pieces, me, omp_get_num_threads()));
        ends[me] = walk.run();
#pragma omp barrier
        walk.finish(ends);
    }
}

template <class Q>
void attention_over(const Problem& p, int64_t tokens, const void* q, const void* k, const void* v, int kv_bf16, void* out) {
    const Q* queries = static_cast<const Q*>(q);
    if (kv_bf16)
        attention<Q, bf16>(p, tokens, {queries, static_cast<const bf16*>(k), static_cast<const bf16*>(v), static_cast<Q*>(out)});
    else
        attention<Q, float>(p, tokens, {queries, static_cast<const float*>(k), static_cast<const float*>(v), static_cast<Q*>(out)});
}

}  // namespace

extern "C" void rw_attention(const void* q, int q_bf16, const void* k, const void* v, int kv_bf16, void* out,
                             const int32_t* page_table, const int32_t* kv_lens, const int32_t* q_starts,
                             int64_t tokens, int64_t table_width, int64_t sequences, int64_t q_heads, int64_t kv_heads,
                             int64_t d, int64_t page_size, int64_t page_stride, int64_t window, float scale) {
    Problem p{page_table, kv_lens, q_starts, table_width, sequences,   q_heads, kv_heads,
              d,          page_size, page_stride, window,   scale};
    (q_bf16 ? attention_over<bf16> : attention_over<float>)(p, tokens, q, k, v, kv_bf16, out);
}
