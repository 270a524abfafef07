// Paged attention with grouped heads: decode, chunks of prompts and mixed batches are one case.
//
// Knows no layers. A row is one query head of one token. Keys are cut at multiples of CUT tokens of their sequence; a row's
// cuts are computed apart (maximum, sum, weighted values) and merged in index order. Who computes which rows and which
// cuts does not change a bit, so decode equals prefill and any chunking.
#include <omp.h>

#include <algorithm>
#include <vector>

#include "kv_cut.h"
#include "workspace.h"

namespace {

constexpr int BLOCK_ROWS = 48;  // rows that share one packing of a cut

struct Problem {
    const int32_t *page_table, *kv_lens, *q_starts;
    int64_t table_width, sequences, q_heads, kv_heads, d, page_size, page_stride, window;
    float scale;

    int64_t group() const { return q_heads / kv_heads; }
};

// Rows [row, row + rows) of one sequence and KV head (row = token * group + head of the group), cuts [cut, last_cut).
struct Piece {
    int64_t sequence, kv_head, row, rows, cut, last_cut, partial;
};

struct Partial {
    float *o, *top, *total;  // [rows][padded d], [rows], [rows]
};

size_t partial_floats(const Problem& p, int64_t rows) { return rows * (padded_head(p.d) + 2); }

Partial partial_at(const Problem& p, int64_t rows, float* at) {
    float* top = at + rows * padded_head(p.d);
    return {at, top, top + rows};
}

// Tokens [first, last) that a row of the piece sees.
void visible(const Problem& p, const Piece& piece, int64_t row, int64_t& first, int64_t& last) {
    int64_t b = piece.sequence, queries = p.q_starts[b + 1] - p.q_starts[b];
    last = p.kv_lens[b] - queries + row / p.group() + 1;
    first = p.window && last > p.window ? last - p.window : 0;
}

// ---- one cut of a piece ----------------------------------------------------------------------------------------------
// Scores [CUT] -> weights 2^(score - top), zero outside [first, last). MASKED: not every key is inside.
template <bool MASKED>
void soften(float* s, int first, int last, float& top, float& total) {
    vi lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    auto seen = [&](int j) { return (lane + j >= first) & (lane + j < last); };
    vf best = splat(-__builtin_inff()), acc{};
    for (int j = 0; j < CUT; j += LANES) {
        vf x = load<vf>(s + j);
        best = (MASKED ? seen(j) & (x > best) : x > best) ? x : best;
    }
    top = largest(best);
#pragma GCC unroll 4
    for (int j = 0; j < CUT; j += LANES) {
        vf weight = exp2_of<true>(load<vf>(s + j) - top);
        if (MASKED) weight = seen(j) ? weight : vf{};
        store(s + j, weight);
        acc += weight;
    }
    total = sum(acc);
}

struct Range {
    int first, last;
};

// Rows whose ranges differ go one by one, so that a weight of zero never meets a value the row must not see.
void weigh(const Problem& p, const float* values, const float* s, int rows, const Range* range, float* o) {
    int64_t width = padded_head(p.d);
    bool whole = std::all_of(range, range + rows, [](Range r) { return r.first == 0 && r.last == CUT; });
    if (whole) {
        strided_tile<float, CUT>(rows)(s, values, CUT * PANEL, int(width / PANEL), CUT, o, width);
        return;
    }
    for (int r = 0; r < rows; r++) {
        int first = range[r].first, keys = std::max(0, range[r].last - first);
        tile_panels<1, float, false, CUT, 1>(s + r * CUT + first, values + first * PANEL, CUT * PANEL, int(width / PANEL),
                                      keys, o + r * width, width);
    }
}

struct Scores {
    float s[BLOCK_ROWS * CUT];
    Range range[BLOCK_ROWS];
};

// Calls body(first row, rows) for every tile of the piece.
template <class Body>
void each_tile(const Piece& piece, Body body) {
    int count = int(piece.rows);
    for (int t = 0; t < tile_count(count); t++) body(tile_start(count, t), tile_start(count, t + 1) - tile_start(count, t));
}

void score(const Problem& p, const Piece& piece, int64_t start, const float* keys, const float* q, Scores& scores,
           Partial out) {
    each_tile(piece, [&](int row, int rows) {
        interleaved_tile<float, false>(rows)(q + row * p.d, keys, padded_head(p.d) * PANEL, CUT / PANEL, int(p.d),
                                      scores.s + row * CUT, CUT);
        for (int r = row; r < row + rows; r++) {
            int64_t first, last;
            visible(p, piece, piece.row + r, first, last);
            Range seen{int(std::clamp<int64_t>(first - start, 0, CUT)), int(std::clamp<int64_t>(last - start, 0, CUT))};
            auto softened = seen.first == 0 && seen.last == CUT ? soften<false> : soften<true>;
            softened(scores.s + r * CUT, seen.first, seen.last, out.top[r], out.total[r]);
            scores.range[r] = seen;
        }
    });
}

void gather(const Problem& p, const Piece& piece, const float* values, const Scores& scores, Partial out) {
    each_tile(piece, [&](int row, int rows) {
        weigh(p, values, scores.s + row * CUT, rows, scores.range + row, out.o + row * padded_head(p.d));
    });
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
        for (int i = 0; i < p.d; i += LANES) {
            vf o = load<vf>(state.o + r * width + i);
            store_at(row, i, int(p.d), state.total[r] == 0.0f ? vf{} : o / state.total[r]);
        }
    }
}

// ---- pieces ----------------------------------------------------------------------------------------------------------
template <class Q>
void pack_queries(const Problem& p, const Piece& piece, const Q* q, float* out) {
    each_tile(piece, [&](int start, int rows) {
        for (int r = 0; r < rows; r++) {
            const Q* row = q + head_index(p, piece, start + r) * p.d;
            for (int64_t i = 0; i < p.d; i++)
                out[start * p.d + i * rows + r] = widen(row[i]) * (p.scale * 1.44269504088896341f);
        }
    });
}

// Computes the piece's cuts; done(cut index, partial) follows each. place(index) says where a partial goes.
template <class Q, class KV, class Place, class Done>
void run(const Problem& p, const Piece& piece, const Q* q, const KV* k, const KV* v, float* space, Place place,
         Done done) {
    float *packed = space, *panels = packed + BLOCK_ROWS * p.d;  // keys, then values: together they would not fit in L1
    Scores scores;
    Pages<KV> pages{k, v, p.page_table + piece.sequence * p.table_width, p.page_stride, p.page_size, p.d};
    int64_t first, last, unused;
    visible(p, piece, piece.row, first, unused);
    visible(p, piece, piece.row + piece.rows - 1, unused, last);
    pack_queries(p, piece, q, packed);
    CutRows<KV> rows[2];  // this cut's and the next one's
    pages.find(piece.kv_head, piece.cut * CUT, first, last, rows[piece.cut % 2]);
    for (int64_t c = piece.cut; c < piece.last_cut; c++) {
        const CutRows<KV>&here = rows[c % 2], &next = rows[(c + 1) % 2];
        if (c + 1 < piece.last_cut)
            pages.find(piece.kv_head, (c + 1) * CUT, first, last, rows[(c + 1) % 2]);
        else
            rows[(c + 1) % 2] = here;
        Partial partial = place(c - piece.cut);
        pack_keys(here.k, next.k, p.d, panels);
        score(p, piece, c * CUT, panels, packed, scores, partial);
        pack_values(here.v, next.v, p.d, panels);
        gather(p, piece, panels, scores, partial);
        done(partial);
    }
}

size_t run_floats(const Problem& p) { return BLOCK_ROWS * p.d + CUT * padded_head(p.d); }

std::vector<Piece> pieces_of(const Problem& p) {
    std::vector<Piece> pieces;
    for (int64_t b = 0; b < p.sequences; b++) {
        int64_t rows = (p.q_starts[b + 1] - p.q_starts[b]) * p.group();
        for (int64_t row = 0; row < rows; row += BLOCK_ROWS)
            for (int64_t head = 0; head < p.kv_heads; head++) {
                Piece piece{b, head, row, std::min<int64_t>(BLOCK_ROWS, rows - row), 0, 0, 0};
                int64_t first, last, unused;
                visible(p, piece, row, first, unused);
                visible(p, piece, row + piece.rows - 1, unused, last);
                piece.cut = first / CUT;
                piece.last_cut = (last + CUT - 1) / CUT;
                pieces.push_back(piece);
            }
    }
    return pieces;
}

int64_t cost(const Piece& piece) { return (piece.last_cut - piece.cut) * (piece.rows + 8); }

template <class Q, class KV>
void whole(const Problem& p, std::vector<Piece>& pieces, const Q* q, const KV* k, const KV* v, Q* out) {
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return cost(a) > cost(b); });
#pragma omp parallel for schedule(dynamic) if (pieces.size() > 1)
    for (size_t i = 0; i < pieces.size(); i++) {
        static thread_local Workspace workspace;
        const Piece& piece = pieces[i];
        float* space = workspace.get<float>(run_floats(p) + 2 * partial_floats(p, BLOCK_ROWS));
        Partial state = partial_at(p, piece.rows, space + run_floats(p));
        Partial part = partial_at(p, piece.rows, space + run_floats(p) + partial_floats(p, BLOCK_ROWS));
        clear(p, piece.rows, state);
        run(p, piece, q, k, v, space, [&](int64_t) { return part; },
            [&](Partial done) { merge(p, piece.rows, state, done); });
        write_out(p, piece, state, out);
    }
}

// Few rows over long contexts: threads share the cuts of a piece, every cut keeps its partial, the merge follows.
template <class Q, class KV>
void split(const Problem& p, std::vector<Piece>& pieces, int64_t cuts_each, const Q* q, const KV* k, const KV* v,
           Q* out) {
    static thread_local Workspace kept;
    size_t floats = 0;
    std::vector<Piece> parts;
    for (Piece& piece : pieces) {
        piece.partial = int64_t(floats);
        for (int64_t c = piece.cut; c < piece.last_cut; c += cuts_each) {
            Piece part = piece;
            part.cut = c;
            part.last_cut = std::min(c + cuts_each, piece.last_cut);
            part.partial = int64_t(floats);
            floats += partial_floats(p, piece.rows) * (part.last_cut - c);
            parts.push_back(part);
        }
        floats += partial_floats(p, piece.rows);  // the merged state
    }
    float* partials = kept.get<float>(floats);
    auto slot = [&](const Piece& piece, int64_t i) {
        return partial_at(p, piece.rows, partials + piece.partial + i * partial_floats(p, piece.rows));
    };
#pragma omp parallel
    {
        static thread_local Workspace workspace;
        float* space = workspace.get<float>(run_floats(p));
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < parts.size(); i++)
            run(p, parts[i], q, k, v, space, [&](int64_t c) { return slot(parts[i], c); }, [](Partial) {});
#pragma omp for schedule(dynamic)
        for (size_t i = 0; i < pieces.size(); i++) {
            const Piece& piece = pieces[i];
            int64_t cuts = piece.last_cut - piece.cut;
            Partial state = slot(piece, cuts);
            clear(p, piece.rows, state);
            for (int64_t c = 0; c < cuts; c++) merge(p, piece.rows, state, slot(piece, c));
            write_out(p, piece, state, out);
        }
    }
}

template <class Q, class KV>
void attention(const Problem& p, int64_t tokens, const Q* q, const KV* k, const KV* v, Q* out) {
    int64_t covered = p.q_starts[p.sequences], threads = omp_get_max_threads(), cuts = 0;
    std::fill(out + covered * p.q_heads * p.d, out + tokens * p.q_heads * p.d, Q{});
    std::vector<Piece> pieces = pieces_of(p);
    for (const Piece& piece : pieces) cuts += piece.last_cut - piece.cut;
    bool few = int64_t(pieces.size()) < 4 * threads && threads > 1 && cuts > int64_t(pieces.size());
    if (few)
        split(p, pieces, std::max<int64_t>(1, cuts / (16 * threads)), q, k, v, out);
    else
        whole(p, pieces, q, k, v, out);
}

template <class Q>
void attention_over(const Problem& p, int64_t tokens, const Q* q, const void* k, const void* v, int kv_bf16, Q* out) {
    if (kv_bf16)
        attention(p, tokens, q, static_cast<const bf16*>(k), static_cast<const bf16*>(v), out);
    else
        attention(p, tokens, q, static_cast<const float*>(k), static_cast<const float*>(v), out);
}

}  // namespace

extern "C" void rw_attention(const void* q, int q_bf16, const void* k, const void* v, int kv_bf16, void* out,
                             const int32_t* page_table, const int32_t* kv_lens, const int32_t* q_starts,
                             int64_t tokens, int64_t table_width, int64_t sequences, int64_t q_heads, int64_t kv_heads,
                             int64_t d, int64_t page_size, int64_t page_stride, int64_t window, float scale) {
    Problem p{page_table, kv_lens, q_starts, table_width, sequences,   q_heads, kv_heads,
              d,          page_size, page_stride, window,   scale};
    if (q_bf16)
        attention_over(p, tokens, static_cast<const bf16*>(q), k, v, kv_bf16, static_cast<bf16*>(out));
    else
        attention_over(p, tokens, static_cast<const float*>(q), k, v, kv_bf16, static_cast<float*>(out));
}
