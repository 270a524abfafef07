// Paged attention with grouped heads: decode, chunks of prompts and mixed batches are one case.
//
// Knows no layers. A row is one query head of one token. Keys are cut at multiples of CUT tokens of their sequence; a row's
// cuts are computed apart (maximum, sum, weighted values) and merged in index order. Who computes which rows and which
// cuts does not change a bit, so decode equals prefill and any chunking.
#pragma once
#include <omp.h>

#include <optional>

#include "attend_cut.h"
#include "operations.h"

template <class KV>
using Row = std::conditional_t<SCALED<KV>, bf16, KV>;  // what keys and values are multiplied as

template <class Q, class KV>
using KindOf = std::conditional_t<HAS_BF16_DOT && std::is_same_v<Q, bf16> && std::is_same_v<Row<KV>, bf16>, DotPairs, Floats>;

// ---- queries in, outputs out -----------------------------------------------------------------------------------------
inline int64_t head_index(const Problem& p, const Piece& piece, int64_t r) {  // of row r in [T, q_heads]
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

// LANES words of factors of a query from element i on, zeros beyond its d.
inline vu query_words(const bf16* row, int64_t i, int64_t d, uint32_t) { return i < d ? words_at(row, i, d) : vu{}; }

template <class Q>
vu query_words(const Q* row, int64_t i, int64_t d, float) {
    return (vu)load_at(row, int(i), int(d));
}

// The queries of a tile, turned: [padded d][rows]. Stores overlap and run upwards, LANES words beyond the last.
template <class Kind, class Q>
void put_queries(const Q* const* queries, int rows, int64_t d, typename Kind::Word* to) {
    constexpr int SQUARES = (MAX_ROWS + LANES - 1) / LANES;
    constexpr int64_t ELEMENTS = std::is_same_v<typename Kind::Word, uint32_t> ? 2 * LANES : LANES;
    vu square[SQUARES][LANES];
    for (int64_t i = 0; i < padded_head(d); i += ELEMENTS) {
        for (int first = 0; first < rows; first += LANES) {
            vu* v = square[first / LANES];
            for (int r = 0; r < LANES; r++)
                v[r] = first + r < rows ? query_words(queries[first + r], i, d, typename Kind::Word()) : vu{};
            transpose(square[first / LANES]);
        }
        for (int w = 0; w < LANES; w++, to += rows)
            for (int first = 0; first < rows; first += LANES) store(to + first, square[first / LANES][w]);
    }
}

template <class Kind, class Q, class KV>
__attribute__((noinline)) void pack_queries(const Problem& p, const Piece& piece, const Q* q, Scratch& x) {
    using F = Factors<Kind, Row<KV>>;
    int64_t row_words = padded_head(p.d) * F::PARTS / F::PER_WORD;
    each_tile(piece, [&](int start, int rows) {
        const Q* queries[MAX_ROWS];
        for (int r = 0; r < rows; r++) {
            x.seen[start + r] = visible(p, piece, start + r);
            queries[r] = q + head_index(p, piece, start + r) * p.d;
        }
        put_queries<Kind>(queries, rows, p.d, factors<Kind>(x.q) + start * row_words);
    });
}

// ---- a thread's walk -------------------------------------------------------------------------------------------------
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
        StoredRows<KV> rows[2];  // this cut's and the next one's
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
                attend(piece, c, rows[now], rows[1 - now], starts(s) ? nullptr : x.saved + (c - s.from) * floats_of(piece));
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
                for (int64_t c = 0; c < end.cuts; c++)
                    merge(p, piece.rows, x.state, partial_at(p, piece.rows, end.partials + c * floats_of(piece)));
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
        return (share[0].to - share[0].from) * floats_of(pieces[share[0].piece]);
    }

    int64_t floats_of(const Piece& piece) const { return partial_floats(p, piece.rows); }

    void begin(const Piece& piece) {
        pack_queries<Kind, Q, KV>(p, piece, t.q, x);
        clear(p, piece.rows, x.state);
    }

    // Into the state, or into partials of their own.
    void attend(const Piece& piece, int64_t cut, const StoredRows<KV>& here, const StoredRows<KV>& next, float* partials) {
        if constexpr (SCALED<KV>) {
            WideCut wide;
            widen_cut(here, next, p.d, x.wide, wide);
            attend(piece, {p, piece, cut, wide.rows, wide.rows, wide.scales(), x}, partials);
        } else {
            attend(piece, {p, piece, cut, here, next, {}, x}, partials);
        }
    }

    void attend(const Piece& piece, const CutOfPiece<Kind, Row<KV>>& cut, float* partials) {
        each_tile(piece, [&](int row, int rows) {
            if (partials) return cut.attend(row, rows, rows_from(p, row, partial_at(p, piece.rows, partials)));
            cut.attend(row, rows, x.part);
            merge(p, rows, rows_from(p, row, x.state), x.part);
        });
    }

    void find(const Stretch& s, int64_t cut, StoredRows<KV>& rows) const {
        const Piece& piece = pieces[s.piece];
        Slots<const KV> keys{t.k, p.page_stride, p.page_size, p.d}, values{t.v, p.page_stride, p.page_size, p.d};
        Pages<KV> pages{keys, values, p.page_table + piece.sequence * p.table_width};
        pages.find(piece.kv_head, cut * CUT, piece.tokens.first, piece.tokens.last, rows);
    }
};

template <class Q, class KV>
void attention(const Problem& p, int64_t tokens, Tensors<Q, KV> t) {
    std::fill(t.out + p.q_starts[p.sequences] * p.q_heads * p.d, t.out + tokens * p.q_heads * p.d, Q{});
    std::vector<Piece> pieces = pieces_of(p);
    std::vector<Loose> ends(omp_get_max_threads());
    Shortage shortage;
#pragma omp parallel if (total_cost(pieces) > PARALLEL_FROM)
    {
        int me = omp_get_thread_num();
        std::optional<Walk<Q, KV>> walk;
        shortage.watch([&] {
            walk.emplace(p, pieces, t, share_of(pieces, me, omp_get_num_threads()));
            ends[me] = walk->run();
        });
#pragma omp barrier
        if (shortage.outcome() == DONE) walk->finish(ends);
    }
    must(shortage.outcome());
}

// What the call tells of its tensors; queries and outputs are Q, kv_kind as in slots.h.
struct Untyped {
    const void *q, *k, *v;
    int kv_kind;
    void* out;
};

template <class Q>
void attention_over(const Problem& p, int64_t tokens, const Untyped& t) {
    with_kv(t.kv_kind, [&](auto value) {
        using KV = decltype(value);
        attention<Q, KV>(p, tokens, {static_cast<const Q*>(t.q), static_cast<const KV*>(t.k),
                                     static_cast<const KV*>(t.v), static_cast<Q*>(t.out)});
    });
}

// Compiled apart, so that a machine's first start compiles them side by side.
void attention_of_floats(const Problem& p, int64_t tokens, const Untyped& t);  // attention_floats.cpp
void attention_of_pairs(const Problem& p, int64_t tokens, const Untyped& t);   // attention_pairs.cpp
