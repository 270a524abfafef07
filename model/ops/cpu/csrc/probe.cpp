// What the machine gives: a read of memory and a run of dot products, for the benchmark to divide by.
//
// Knows no operation of a model.
#include <omp.h>

#include "kinds.h"

namespace {

constexpr int CHAINS = 12;

template <class Kind, int PRODUCTS>  // so many products a lane
int64_t dots(int64_t rounds) {
    int64_t threads = 1;
    alignas(64) static const uint8_t ones[VEC_BYTES] = {1, 1, 1, 1};
#pragma omp parallel
    {
        typename Kind::Sums acc[CHAINS] = {}, rest{};
        auto w = Kind::weights(ones, 0);
        auto x = Kind::spread(typename Kind::Word(1));
        for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 12
            for (int j = 0; j < CHAINS; j++) acc[j] = pinned(Kind::dot(w, x, acc[j]));
        for (auto& a : acc) rest += a;
        asm volatile("" : : "m"(rest));
#pragma omp single
        threads = omp_get_num_threads();
    }
    return threads * rounds * CHAINS * LANES * PRODUCTS * 2;
}

}  // namespace

extern "C" {

// Sum of the words of an array: all threads read it once.
float rw_probe_read(const float* data, int64_t count) {
    float total = 0.0f;
#pragma omp parallel for schedule(static) reduction(+ : total)
    for (int64_t block = 0; block < count / 4096; block++) {
        vf acc[4] = {};
        for (int i = 0; i < 4096; i += 4 * LANES)
            for (int j = 0; j < 4; j++) acc[j] += load<vf>(data + block * 4096 + i + j * LANES);
        total += sum((acc[0] + acc[1]) + (acc[2] + acc[3]));
    }
    return total;
}

// Operations (a product and a sum are two) of rounds of dot products on CHAINS independent vectors, on every thread: of
// fp32, of pairs of bf16, of quads of bytes, each in the way that linear layers multiply them.
int64_t rw_probe_floats(int64_t rounds) { return dots<Floats, 1>(rounds); }

int64_t rw_probe_pairs(int64_t rounds) {
    return HAS_BF16_DOT ? dots<DotPairs, 2>(rounds) : dots<Floats, 1>(rounds);
}

int64_t rw_probe_quads(int64_t rounds) {
    return HAS_BYTE_DOT ? dots<DotBytes, 4>(rounds) : dots<WidenedBytes, 2>(rounds);
}
}
