// Paged attention with grouped heads: decode, chunks of prompts and mixed batches are one case.
//
// Knows no layers. A row is one query head of one token. Keys are cut at multiples of CUT tokens of their sequence; a row's
// cuts are computed apart (maximum, sum, weighted values) and merged in index order. Who computes which rows and which
// cuts does not change a bit, so decode equals prefill and any chunking.
#include <omp.h>

#include "attention_work.h"
#include "few_rows.h"
#include "operations.h"
#include "workspace.h"

namespace {

constexpr float LOG2_E = 1.44269504088896341f;

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
    float *q, *panels;  // [padded d][rows] of every tile; keys, then values: together they would not fit in L1
    float* s;           // [BLOCK_ROWS][CUT]
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

// ---- one cut of a piece ----------------------------------------------------------------------------------------------
// Scores -> weights 2^(score - top), zero outside the range. MASKED: not every key is inside.
template <bool MASKED>
void soften(float* s, Range range, float& top, float& total) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    auto seen = [&](int j) { return (lane + j >= range.first) & (lane + j < range.last); };
    int end = MASKED ? range.last : CUT;
    vf best = splat(-__builtin_inff()), acc{};
    for (int j = 0; j < end; j += LANES) {
        vf x = load<vf>(s + j);
        best = (MASKED ? seen(j) & (x > best) : x > best) ? x : best;
    }
    const float highest = largest(best);
#pragma GCC unroll 4
    for (int j = 0; j < end; j += LANES) {
        vf weight = exp2_of<true>(load<vf>(s + j) - highest);
        if (MASKED) weight = seen(j) ? weight : vf{};
        store(s + j, weight);
        acc += weight;
    }
    top = highest, total = sum(acc);
}

template <class KV>
void score(const Problem& p, const Piece& piece, const CutRows<KV>& here, const CutRows<KV>& next, Scratch& x) {
    int64_t width = padded_head(p.d);
    if (piece.rows <= MAX_ROWS) {
        few_rows<KV>(int(piece.rows)).scores(here.k, next.k, p.d, x.q, x.s);
        return;
    }
    pack_keys(here.k, next.k, p.d, x.panels);
    each_tile(piece, [&](int row, int rows) {
        int panels = (x.range[row + rows - 1].last + PANEL - 1) / PANEL;  // beyond, no row of the tile sees a key
        interleaved_tile<float, false>(rows)(x.q + row * width, x.panels, width * PANEL, panels, int(p.d),
                                             x.s + row * CUT, CUT);
    });
}

// Rows whose ranges differ go apart, so that a weight of zero never meets a value the row must not see.
template <class KV>
void weigh(const Problem& p, const Piece& piece, const CutRows<KV>& here, const CutRows<KV>& next, Scratch& x, float* o) {
    int64_t width = padded_head(p.d);
    bool few = piece.rows <= MAX_ROWS;
    if (!few) pack_values(here.v, next.v, p.d, x.panels);
    each_tile(piece, [&](int row, int rows) {
        for (int r = row, end; r < row + rows; r = end) {
            Range range = x.range[r];
            for (end = r + 1; end < row + rows && x.range[end].last == range.last && x.range[end].first == range.first;) end++;
            int keys = range.last - range.first;
            const float* weights = x.s + r * CUT + range.first;
            if (few)
                few_rows<KV>(end - r).values(here.v + range.first, next.v, keys, p.d, weights, o + r * width, width);
            else
                strided_tile<float, CUT>(end - r)(weights, x.panels + range.first * PANEL, CUT * PANEL,
                                                  int(width / PANEL), keys, o + r * width, width);
        }
    });
}

template <class KV>
void compute(const Problem& p, const Piece& piece, int64_t cut, const CutRows<KV>& here, const CutRows<KV>& next,
             Scratch& x, Partial out) {
    for (int r = 0; r < piece.rows; r++) {
        int first = int(std::clamp<int64_t>(x.seen[r].first - cut * CUT, 0, CUT));
        x.range[r] = {first, int(std::clamp<int64_t>(x.seen[r].last - cut * CUT, first, CUT))};
    }
    score(p, piece, here, next, x);
    for (int r = 0; r < piece.rows; r++)
        (x.range[r].whole() ? soften<false> : soften<true>)(x.s + r * CUT, x.range[r], out.top[r], out.total[r]);
    weigh(p, piece, here, next, x, out.o);
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
template <class Q>
void pack_queries(const Problem& p, const Piece& piece, const Q* q, Scratch& x) {
    int64_t width = padded_head(p.d);
    each_tile(piece, [&](int start, int rows) {
        for (int r = 0; r < rows; r++) {
            x.seen[start + r] = visible(p, piece, start + r);
            const Q* row = q + head_index(p, piece, start + r) * p.d;
            float* to = x.q + start * width + r;
            for (int i = 0; i < width; i += LANES) {
                float scaled[LANES];
                store(scaled, load_at(row, i, int(p.d)) * (p.scale * LOG2_E));
                for (int j = 0; j < LANES; j++) to[(i + j) * rows] = scaled[j];
            }
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
                compute(p, piece, c, rows[now], rows[1 - now], x, part);
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
        pack_queries(p, piece, t.q, x);
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
