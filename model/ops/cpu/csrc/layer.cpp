// What a decoder layer does between its matrix products: add and RMSNorm, RoPE and the write to the cache, silu times up.
//
// Knows no weights of a linear layer. Rows are independent; threads take whole rows.
#include <omp.h>

#include <algorithm>

#include "operations.h"
#include "rows.h"
#include "slots.h"

namespace {

constexpr int64_t PARALLEL_FROM = 1 << 14;  // elements: below, starting the threads costs more than they save

template <class T>
void add_rms_norm(const T* x, const T* residual, const T* weight, float eps, int64_t rows, int n, T* out, T* total) {
#pragma omp parallel for schedule(static) if (rows * n > PARALLEL_FROM)
    for (int64_t r = 0; r < rows; r++) {
        const T* row = x + r * n;
        if (residual) {
            for (int i = 0; i < n; i += LANES)
                store_at(total + r * n, i, n, load_at(row, i, n) + load_at(residual + r * n, i, n));
            row = total + r * n;
        }
        rms_norm_row(row, weight, eps, n, out + r * n);
    }
}

template <class T>
void silu_mul(const T* gate_up, int64_t rows, int n, T* out) {
#pragma omp parallel for schedule(static) if (rows * n > PARALLEL_FROM)
    for (int64_t r = 0; r < rows; r++)
        for (int i = 0; i < n; i += LANES) {
            vf gate = load_at(gate_up + 2 * r * n, i, n), up = load_at(gate_up + (2 * r + 1) * n, i, n);
            store_at(out + r * n, i, n, gate / (1.0f + exp2_of(gate * -1.44269504088896341f)) * up);
        }
}

struct Rope {
    int64_t tokens, q_heads, kv_heads;
    int d, half;
    const float* cos_sin;  // [max_position, 2 * half]
    const int64_t *positions, *slots;
    int64_t page_size, page_stride;
    float eps;
};

template <class T>
struct Heads {
    const T *qkv, *q_norm, *k_norm;
    T* q;
};

template <class T>
void turn_head(const Rope& p, const T* x, const T* norm, int64_t position, T* out) {
    T normed[MAX_HEAD];
    if (norm) {
        rms_norm_row(x, norm, p.eps, p.d, normed);
        x = normed;
    }
    const float* cosine = p.cos_sin + position * 2 * p.half;
    rotate_row(x, cosine, cosine + p.half, p.half, out);
    std::copy(x + 2 * p.half, x + p.d, out + 2 * p.half);
}

template <class T, class KV>
void rope_write(const Rope& p, Heads<T> h, Slots<KV> k, Slots<KV> v) {
    int64_t heads = p.q_heads + 2 * p.kv_heads;
#pragma omp parallel for schedule(static) if (p.tokens * heads * p.d > PARALLEL_FROM)
    for (int64_t t = 0; t < p.tokens; t++) {
        const T* x = h.qkv + t * heads * p.d;
        T turned[MAX_HEAD];
        for (int64_t i = 0; i < p.q_heads; i++)
            turn_head(p, x + i * p.d, h.q_norm, p.positions[t], h.q + (t * p.q_heads + i) * p.d);
        int64_t page = p.slots[t] / p.page_size, offset = p.slots[t] % p.page_size;
        for (int64_t i = 0; i < p.kv_heads; i++) {
            turn_head(p, x + (p.q_heads + i) * p.d, h.k_norm, p.positions[t], turned);
            k.put(page, i, offset, turned);
            v.put(page, i, offset, x + (p.q_heads + p.kv_heads + i) * p.d);
        }
    }
}

template <class T>
void rope_write_to(const Rope& p, Heads<T> heads, void* k, void* v, int kv_kind) {
    with_kv(kv_kind, [&](auto value) {
        using KV = decltype(value);
        auto slots = [&](void* pool) { return Slots<KV>{static_cast<KV*>(pool), p.page_stride, p.page_size, p.d}; };
        rope_write(p, heads, slots(k), slots(v));
    });
}

template <class T>
const T* as(const void* p) {
    return static_cast<const T*>(p);
}

template <class T>
T* as(void* p) {
    return static_cast<T*>(p);
}

}  // namespace

extern "C" {

int rw_add_rms_norm(const void* x, const void* residual, const void* weight, int is_bf16, float eps, int64_t rows,
                    int64_t n, void* out, void* total) {
    if (is_bf16)
        add_rms_norm(as<bf16>(x), as<bf16>(residual), as<bf16>(weight), eps, rows, int(n), as<bf16>(out),
                     as<bf16>(total));
    else
        add_rms_norm(as<float>(x), as<float>(residual), as<float>(weight), eps, rows, int(n), as<float>(out),
                     as<float>(total));
    return DONE;
}

int rw_silu_mul(const void* gate_up, int is_bf16, int64_t rows, int64_t n, void* out) {
    if (is_bf16)
        silu_mul(as<bf16>(gate_up), rows, int(n), as<bf16>(out));
    else
        silu_mul(as<float>(gate_up), rows, int(n), as<float>(out));
    return DONE;
}

int rw_rope_write(const void* qkv, const void* q_norm, const void* k_norm, int is_bf16, void* q, float eps,
                  const float* cos_sin, const int64_t* positions, const int64_t* slots, int64_t tokens,
                  int64_t q_heads, int64_t kv_heads, int64_t d, int64_t rotary, void* k, void* v, int kv_kind,
                  int64_t page_size, int64_t page_stride) {
    Rope p{tokens, q_heads, kv_heads, int(d), int(rotary / 2), cos_sin, positions, slots, page_size, page_stride, eps};
    if (is_bf16)
        rope_write_to(p, Heads<bf16>{as<bf16>(qkv), as<bf16>(q_norm), as<bf16>(k_norm), as<bf16>(q)}, k, v, kv_kind);
    else
        rope_write_to(p, Heads<float>{as<float>(qkv), as<float>(q_norm), as<float>(k_norm), as<float>(q)}, k, v,
                      kv_kind);
    return DONE;
}

// Pages of so many bytes, one behind the other, of keys and of values; no page is both read and written.
int rw_copy_pages(void* k, void* v, int64_t bytes, const int64_t* src, const int64_t* dst, int64_t count) {
#pragma omp parallel for schedule(static) if (count * bytes > PARALLEL_FROM)
    for (int64_t i = 0; i < count; i++)
        for (void* pool : {k, v}) memcpy(as<char>(pool) + dst[i] * bytes, as<char>(pool) + src[i] * bytes, bytes);
    return DONE;
}
}
