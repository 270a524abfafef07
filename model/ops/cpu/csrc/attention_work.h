// The work of one attention call, and each thread's share of it.
//
// Knows no values of tensors. A piece is rows of one sequence and KV head, with the cuts that any of them sees. Threads
// take runs of cuts of equal cost; a piece may begin in one thread's share and end in another's.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

#include "kv_cut.h"

constexpr int BLOCK_ROWS = 192;        // rows that share one packing of a cut
constexpr int64_t CUT_COST = 8;        // of reading a cut, in rows of arithmetic
constexpr int64_t PARALLEL_FROM = 32;  // cost: below, starting the threads takes longer than the work

struct Problem {
    const int32_t *page_table, *kv_lens, *q_starts;
    int64_t table_width, sequences, q_heads, kv_heads, d, page_size, page_stride, window;
    float scale;

    int64_t group() const { return q_heads / kv_heads; }
};

struct Span {  // tokens of a sequence
    int64_t first, last;
};

// Rows [row, row + rows) of one sequence and KV head (row = token * group + head of the group), cuts [cut, last_cut).
struct Piece {
    int64_t sequence, kv_head, row, rows, cut, last_cut;
    Span tokens;   // seen by any of its rows
    int64_t cost;  // of all pieces before it

    int64_t cut_cost() const { return rows + CUT_COST; }
    int64_t end_cost() const { return cost + (last_cut - cut) * cut_cost(); }

    // The first cut that begins at this cost or later.
    int64_t cut_from(int64_t at) const {
        return std::clamp(cut + (at - cost + cut_cost() - 1) / cut_cost(), cut, last_cut);
    }
};

// What row r of the piece sees.
static inline Span visible(const Problem& p, const Piece& piece, int64_t r) {
    int64_t b = piece.sequence, queries = p.q_starts[b + 1] - p.q_starts[b];
    int64_t last = p.kv_lens[b] - queries + (piece.row + r) / p.group() + 1;
    return {p.window && last > p.window ? last - p.window : 0, last};
}

static inline int64_t total_cost(const std::vector<Piece>& pieces) { return pieces.empty() ? 0 : pieces.back().end_cost(); }

static inline std::vector<Piece> pieces_of(const Problem& p) {
    std::vector<Piece> pieces;
    for (int64_t b = 0; b < p.sequences; b++) {
        int64_t rows = (p.q_starts[b + 1] - p.q_starts[b]) * p.group();
        for (int64_t row = 0; row < rows; row += BLOCK_ROWS)
            for (int64_t head = 0; head < p.kv_heads; head++) {
                Piece piece{b, head, row, std::min<int64_t>(BLOCK_ROWS, rows - row), 0, 0, {}, total_cost(pieces)};
                piece.tokens = {visible(p, piece, 0).first, visible(p, piece, piece.rows - 1).last};
                piece.cut = piece.tokens.first / CUT;
                piece.last_cut = (piece.tokens.last + CUT - 1) / CUT;
                pieces.push_back(piece);
            }
    }
    return pieces;
}

struct Stretch {
    size_t piece;
    int64_t from, to;  // cuts
};

// The cuts that begin within a thread's part of the cost.
static inline std::vector<Stretch> share_of(const std::vector<Piece>& pieces, int thread, int threads) {
    int64_t total = total_cost(pieces), low = total * thread / threads, high = total * (thread + 1) / threads;
    std::vector<Stretch> share;
    for (size_t i = 0; i < pieces.size(); i++) {
        Stretch stretch{i, pieces[i].cut_from(low), pieces[i].cut_from(high)};
        if (stretch.from < stretch.to) share.push_back(stretch);
    }
    return share;
}
