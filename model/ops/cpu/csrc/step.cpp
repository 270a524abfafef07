// All layers of a decoder in one call: what model/layers.py says, operation by operation, without Python between them.
//
// Knows no arithmetic: it calls the functions that single operations call, so the bits are theirs. The structures are
// mirrored in model/ops/cpu/whole_step.py, field by field.
#include <algorithm>

#include "operations.h"
#include "workspace.h"

namespace {

enum Kind : int64_t { FLOAT32, BFLOAT16, INT8, INT4 };

struct Linear {
    int64_t kind;
    const void* weight;
    const float* bias;
    int64_t outputs, inputs;
};

struct Layer {
    const void *attention_norm, *mlp_norm, *q_norm, *k_norm;
    Linear qkv, out, gate_up, down;
    void *k, *v;
    int64_t kv_kind, q_heads, kv_heads, head_dim, page_size, page_stride, window, group;
    float scale, head_norm_eps;
};

struct Model {
    const Layer* layers;
    int64_t layer_count, hidden, is_bf16;
    const void* norm;
    const float* cos_sin;
    int64_t rotary;
    float eps;
};

struct Group {  // what layers with the same pages share
    const int64_t* slots;
    const int32_t* page_table;
    int64_t table_width;
};

struct Batch {
    int64_t tokens, sequences;
    const int64_t* positions;
    const int32_t *kv_lens, *q_starts;
    const Group* groups;
};

void multiply(const Linear& l, const void* x, int is_bf16, int64_t rows, void* y) {
    if (l.kind == INT8)
        must(rw_linear_int8(x, is_bf16, l.weight, l.bias, y, is_bf16, rows, l.outputs, l.inputs));
    else if (l.kind == INT4)
        must(rw_linear_int4(x, is_bf16, l.weight, l.bias, y, is_bf16, rows, l.outputs, l.inputs));
    else
        must(rw_linear(x, is_bf16, l.weight, l.kind == BFLOAT16, l.bias, y, is_bf16, rows, l.outputs, l.inputs));
}

// What lies between the operations of a layer; the next operation but one may overwrite it.
struct Scratch {
    char *wide;    // [T, qkv], then [T, 2F]
    char *narrow;  // [T, Hq * d] attended, then [T, F]
    char *turned;  // [T, Hq, d] queries, then [T, D] of a half's end

    Scratch(const Model& m, int64_t tokens) {
        int64_t wide_row = 0, narrow_row = 0, turned_row = m.hidden;
        for (const Layer* l = m.layers; l < m.layers + m.layer_count; l++) {
            wide_row = std::max({wide_row, l->qkv.outputs, l->gate_up.outputs});
            narrow_row = std::max({narrow_row, l->out.inputs, l->down.inputs});
            turned_row = std::max(turned_row, l->out.inputs);
        }
        auto bytes = [&](int64_t row) { return (tokens * row * (m.is_bf16 ? 2 : 4) + 63) / 64 * 64; };
        static thread_local Workspace space;
        wide = space.get<char>(bytes(wide_row) + bytes(narrow_row) + bytes(turned_row));
        narrow = wide + bytes(wide_row);
        turned = narrow + bytes(narrow_row);
    }
};

// x [T, D] -> scratch.turned [T, D].
void attend(const Model& m, const Layer& l, const Batch& b, const void* x, const Scratch& s) {
    const Group& g = b.groups[l.group];
    int bf16 = int(m.is_bf16), kv_kind = int(l.kv_kind);
    multiply(l.qkv, x, bf16, b.tokens, s.wide);
    must(rw_rope_write(s.wide, l.q_norm, l.k_norm, bf16, s.turned, l.head_norm_eps, m.cos_sin, b.positions, g.slots,
                       b.tokens, l.q_heads, l.kv_heads, l.head_dim, m.rotary, l.k, l.v, kv_kind, l.page_size,
                       l.page_stride));
    must(rw_attention(s.turned, bf16, l.k, l.v, kv_kind, s.narrow, g.page_table, b.kv_lens, b.q_starts, b.tokens,
                      g.table_width, b.sequences, l.q_heads, l.kv_heads, l.head_dim, l.page_size, l.page_stride, l.window,
                      l.scale));
    multiply(l.out, s.narrow, bf16, b.tokens, s.turned);
}

// x [T, D] -> scratch.turned [T, D].
void feed_forward(const Model& m, const Layer& l, int64_t tokens, const void* x, const Scratch& s) {
    int bf16 = int(m.is_bf16);
    multiply(l.gate_up, x, bf16, tokens, s.wide);
    must(rw_silu_mul(s.wide, bf16, tokens, l.down.inputs, s.narrow));
    multiply(l.down, s.narrow, bf16, tokens, s.turned);
}

void run_layers(const Model& m, const Batch& b, void* x, void* out) {
    Scratch s(m, b.tokens);
    auto norm = [&](const void* added, const void* weight) {  // out = norm of x, once what was computed is added to it
        must(rw_add_rms_norm(added ? added : x, added ? x : nullptr, weight, int(m.is_bf16), m.eps, b.tokens, m.hidden, out, x));
    };
    for (const Layer* l = m.layers; l < m.layers + m.layer_count; l++) {
        norm(l == m.layers ? nullptr : s.turned, l->attention_norm);
        attend(m, *l, b, out, s);
        norm(s.turned, l->mlp_norm);
        feed_forward(m, *l, b.tokens, out, s);
    }
    norm(m.layer_count ? s.turned : nullptr, m.norm);
}

}  // namespace

// x [T, D]: embeddings, overwritten by the residual stream; out [T, D]: after the last norm.
extern "C" int rw_layers(const void* model, const void* batch, void* x, void* out) {
    return outcome_of([&] { run_layers(*static_cast<const Model*>(model), *static_cast<const Batch*>(batch), x, out); });
}
