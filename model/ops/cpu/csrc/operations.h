// The operations as plain C functions, for ctypes and for step.cpp; each is described where it is defined.
//
// Knows no template: pointers, sizes, and a flag where a pointer may mean bf16 or fp32. Each returns an Outcome.
#pragma once
#include <cstdint>

#include "shortage.h"

extern "C" {
int rw_linear(const void* x, int x_bf16, const void* w, int w_bf16, const float* bias, void* y, int y_bf16, int64_t m,
              int64_t n, int64_t k);
int rw_linear_int8(const void* x, int x_bf16, const void* w, const float* bias, void* y, int y_bf16, int64_t m, int64_t n,
                   int64_t k);
int rw_linear_int4(const void* x, int x_bf16, const void* w, const float* bias, void* y, int y_bf16, int64_t m, int64_t n,
                   int64_t k);
int rw_add_rms_norm(const void* x, const void* residual, const void* weight, int is_bf16, float eps, int64_t rows,
                    int64_t n, void* out, void* total);
int rw_silu_mul(const void* gate_up, int is_bf16, int64_t rows, int64_t n, void* out);
int rw_rope_write(const void* qkv, const void* q_norm, const void* k_norm, int is_bf16, void* q, float eps,
                  const float* cos_sin, const int64_t* positions, const int64_t* slots, int64_t tokens,
                  int64_t q_heads, int64_t kv_heads, int64_t d, int64_t rotary, void* k, void* v, int kv_kind,
                  int64_t page_size, int64_t page_stride);
int rw_attention(const void* q, int q_bf16, const void* k, const void* v, int kv_kind, void* out,
                 const int32_t* page_table, const int32_t* kv_lens, const int32_t* q_starts, int64_t tokens,
                 int64_t table_width, int64_t sequences, int64_t q_heads, int64_t kv_heads, int64_t d,
                 int64_t page_size, int64_t page_stride, int64_t window, float scale);
}
