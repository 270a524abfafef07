// The attention operation: which code its queries' type means.
//
// Knows no values of tensors.
#include "attention_walk.h"

extern "C" int rw_attention(const void* q, int q_bf16, const void* k, const void* v, int kv_kind, void* out,
                            const int32_t* page_table, const int32_t* kv_lens, const int32_t* q_starts,
                            int64_t tokens, int64_t table_width, int64_t sequences, int64_t q_heads, int64_t kv_heads,
                            int64_t d, int64_t page_size, int64_t page_stride, int64_t window, float scale) {
    Problem p{page_table, kv_lens, q_starts, table_width, sequences,   q_heads, kv_heads,
              d,          page_size, page_stride, window,   scale};
    return outcome_of([&] { (q_bf16 ? attention_of_pairs : attention_of_floats)(p, tokens, {q, k, v, kv_kind, out}); });
}
