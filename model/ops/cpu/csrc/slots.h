// Where a slot of the cache lies, and what is written there: the layout of model/kv_cache.py.
//
// Knows neither sequences nor tables. A page holds, head by head, the values of its slots and, of a quantised cache, their
// fp32 scales behind them.
#pragma once
#include <type_traits>

#include "quantised_kv.h"

template <class T>  // float, bf16, int8, fp8; const where they are only read
struct Slots {
    using Value = std::remove_const_t<T>;
    static constexpr int64_t SCALE = SCALED<Value> ? int64_t(sizeof(float) / sizeof(Value)) : 0;  // in elements

    T* pool;                           // [num_pages][kv_heads]
    int64_t page_stride, page_size, d;  // in elements

    T* head(int64_t page, int64_t kv_head) const { return pool + page * page_stride + kv_head * page_size * (d + SCALE); }
    T* scale(T* head, int64_t offset) const { return head + page_size * d + offset * SCALE; }

    template <class Row>
    void put(int64_t page, int64_t kv_head, int64_t offset, const Row* row) const {
        T *at = head(page, kv_head), *values = at + offset * d;
        if constexpr (SCALE > 0) {
            float of = quantise_row(row, int(d), values);
            memcpy(scale(at, offset), &of, sizeof of);
        } else {
            for (int i = 0; i < d; i += LANES) store_at(values, i, int(d), load_at(row, i, int(d)));
        }
    }
};

enum class KVKind : int { FLOAT32, BFLOAT16, INT8, FP8 };  // KV_KINDS of model/ops/cpu/whole_step.py

// Calls body with a value of the type of a slot's values.
template <class Body>
static inline void with_kv(int kind, Body body) {
    switch (KVKind(kind)) {
        case KVKind::FLOAT32: return body(float());
        case KVKind::BFLOAT16: return body(bf16());
        case KVKind::INT8: return body(int8());
        case KVKind::FP8: return body(fp8());
    }
}
