// A cut of a quantised cache as rows of bf16 and scales apart.
//
// Knows no queries. A row's values are small numbers that bf16 holds exactly, so products of pairs lose nothing; the scale
// of a key meets its score, that of a value its weight, both in fp32.
#pragma once
#include "kv_cut.h"

struct Scales {  // [CUT]; nothing where the cache has none
    const float *k = nullptr, *v = nullptr;
};

struct WideCut {
    CutRows<bf16> rows;
    float k_scale[CUT], v_scale[CUT];

    Scales scales() const { return {k_scale, v_scale}; }
};

static inline void store_exact(bf16* to, vf low, vf high) {  // values that bf16 holds
#if RW_BF16_DOT
    store(to, (vus)_mm512_cvtne2ps_pbh(high, low));
#else
    store(to, __builtin_convertvector((vu)low >> 16, vh));
    store(to + LANES, __builtin_convertvector((vu)high >> 16, vh));
#endif
}

template <class KV>
static inline const bf16* widened(const KV* row, int d, bf16* to) {
    if (row == zeros<KV>) return zeros<bf16>;
    for (int i = 0; i < d; i += PANEL) store_exact(to + i, load_at(row, i, d), load_at(row, i + LANES, d));
    return to;
}

template <class KV>
static inline float scale_at(const KV* at) {
    float scale;
    memcpy(&scale, at, sizeof scale);
    return scale;
}

// room: [2][CUT][padded d]. Asks for the next cut's rows meanwhile.
template <class KV>
static void widen_cut(const ScaledRows<KV>& here, const ScaledRows<KV>& next, int64_t d, bf16* room, WideCut& out) {
    int64_t width = padded_head(d);
    for (int j = 0; j < CUT; j++) {
        prefetch_row(next.k[j], d), __builtin_prefetch(next.k_scale[j], 0, 2);
        prefetch_row(next.v[j], d), __builtin_prefetch(next.v_scale[j], 0, 2);
        out.rows.k[j] = widened(here.k[j], int(d), room + j * width);
        out.rows.v[j] = widened(here.v[j], int(d), room + (CUT + j) * width);
        out.k_scale[j] = scale_at(here.k_scale[j]), out.v_scale[j] = scale_at(here.v_scale[j]);
    }
}
