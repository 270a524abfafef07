// Kinds of factors: how a word of a panel and a word of x become vectors, and how these are multiplied and added.
//
// Knows neither tiles nor layers. Each Kind has PARTS multiplications a word; part i covers k that come before those of
// part i + 1. Where the CPU multiplies pairs of bf16 or quads of bytes in one instruction, a Kind of one part uses it;
// its portable twin is what tests run on CPUs without it (RW_EMULATE_DOTS) and what check.cpp compares it with. RW_NO_DOTS
// does without such instructions.
#pragma once
#include "vec.h"

typedef int16_t vs __attribute__((vector_size(VEC_BYTES)));
typedef uint16_t vus __attribute__((vector_size(VEC_BYTES)));

#if !defined(RW_NO_DOTS) && \
    ((defined(__AVX512VNNI__) && defined(__AVX512BW__)) || (defined(__AVXVNNI__) && !defined(__AVX512F__)))
#define RW_BYTE_DOT 1
#else
#define RW_BYTE_DOT 0
#endif
#if defined(RW_EMULATE_DOTS)
constexpr bool EMULATED = true;
#else
constexpr bool EMULATED = false;
#endif
constexpr bool HAS_BF16_DOT = EMULATED || RW_BF16_DOT, HAS_BYTE_DOT = EMULATED || RW_BYTE_DOT;

template <class T>
static inline T* fresh(T* p) {  // what p points at is loaded again: registers are few, loads are free
    asm volatile("" : "+r"(p));
    return p;
}

template <class V>
static inline V pinned(V v) {  // computed here and now: the compiler would keep products back, or turn shifts into a mask
#if defined(__x86_64__)
    asm("" : "+v"(v));
#elif defined(__aarch64__)
    asm("" : "+w"(v));
#endif
    return v;
}

static inline vf madd_in_place(vf a, vf b, vf sum) {  // madd(); the compiler would move sums about, and spill some
#if defined(__FMA__)
    asm("vfmadd231ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
#else
    return madd(a, b, sum);
#endif
}

static inline vf low_half(vu pairs) { return (vf)(pairs << 16); }
static inline vf high_half(vu pairs) { return (vf)(pairs & 0xffff0000u); }

// ---- lane i: sum + a[2i] * b[2i] + a[2i + 1] * b[2i + 1], products and sums exact -----------------------------------
static inline vi dot_shorts(vs a, vs b) {
#if defined(__AVX512BW__)
    return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#else
    return (vi)((vu)a << 16) / 65536 * ((vi)((vu)b << 16) / 65536) + ((vi)a >> 16) * ((vi)b >> 16);
#endif
}

// ---- lane i: sum + the four products of unsigned bytes of w with signed bytes of x ----------------------------------
static inline vi dot_bytes_portable(vi w, vi x, vi sum) {
    vs even = (vs)((vus)w & 0x00ff), odd = (vs)((vus)w >> 8);
    vs x_even = (vs)((vus)x << 8) >> 8, x_odd = (vs)x >> 8;
    return sum + dot_shorts(even, x_even) + dot_shorts(odd, x_odd);
}

static inline vi dot_bytes(vi w, vi x, vi sum) {
#if RW_BYTE_DOT && defined(__AVX512F__)
    asm("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(w), "v"(x));  // gcc 12 spills the sums of the intrinsic
    return sum;
#elif RW_BYTE_DOT
    asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sum) : "x"(w), "x"(x));
    return sum;
#else
    return dot_bytes_portable(w, x, sum);
#endif
}

// ---- lane i: sum + the two products of a pair of bf16 ---------------------------------------------------------------
static inline vf dot_pairs_portable(vu w, vu x, vf sum) {
    return madd(low_half(w), low_half(x), madd(high_half(w), high_half(x), sum));
}

static inline vf dot_pairs(vu w, vu x, vf sum) {
#if RW_BF16_DOT
    return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)x);
#else
    return dot_pairs_portable(w, x, sum);
#endif
}

// ---- kinds ----------------------------------------------------------------------------------------------------------
struct Floats {  // x: floats
    using Word = float;
    using Sum = float;
    using Sums = vf;
    static constexpr int PARTS = 1;
    static vf weights(const uint8_t* p, int) { return load<vf>(p); }
    static vf spread(float x) { return splat(x); }
    static vf dot(vf w, vf x, vf sum) { return madd_in_place(w, x, sum); }
};

struct WidenedPairs : Floats {  // pairs of bf16; x: floats
    static constexpr int PARTS = 2;
    static vf weights(const uint8_t* p, int part) { return part ? high_half(load<vu>(p)) : low_half(load<vu>(p)); }
};

struct DotPairs {  // pairs of bf16; x: pairs of bf16
    using Word = uint32_t;
    using Sum = float;
    using Sums = vf;
    static constexpr int PARTS = 1;
    static vu weights(const uint8_t* p, int) { return load<vu>(p); }
    static vu spread(uint32_t x) { return vu{} + x; }
    static vf dot(vu w, vu x, vf sum) { return dot_pairs(w, x, sum); }
};

struct WidenedBytes {  // quads of unsigned bytes; x: 16-bit pairs of bytes 0 and 2, then of bytes 1 and 3
    using Word = uint32_t;
    using Sum = int32_t;
    using Sums = vi;
    static constexpr int PARTS = 2;
    static vs weights(const uint8_t* p, int part) {  // shifts both: a mask would take a register
        return (vs)((part ? load<vus>(p) : pinned(load<vus>(p) << 8)) >> 8);
    }
    static vs spread(uint32_t x) { return (vs)(vu{} + x); }
    static vi dot(vs w, vs x, vi sum) { return pinned(sum + dot_shorts(w, x)); }
};

struct DotBytes {  // quads of unsigned bytes; x: quads of signed bytes
    using Word = uint32_t;
    using Sum = int32_t;
    using Sums = vi;
    static constexpr int PARTS = 1;
    static vi weights(const uint8_t* p, int) { return load<vi>(p); }
    static vi spread(uint32_t x) { return (vi)(vu{} + x); }
    static vi dot(vi w, vi x, vi sum) { return dot_bytes(w, x, sum); }
};
