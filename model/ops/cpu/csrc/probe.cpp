// What the machine gives: a read of memory and a run of multiply-adds, for the benchmark to divide by.
//
// Knows no operation of a model.
#include <omp.h>

#include "vec.h"

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

// Floating-point operations of rounds multiply-adds on 12 independent vectors, on every thread.
int64_t rw_probe_madd(int64_t rounds) {
    constexpr int CHAINS = 12;
    int64_t threads = 1;
#pragma omp parallel
    {
        vf acc[CHAINS], x = splat(0.999f), y = splat(1e-3f);
        for (vf& a : acc) a = splat(1.0f);
        for (int64_t i = 0; i < rounds; i++)
#pragma GCC unroll 12
            for (int j = 0; j < CHAINS; j++) acc[j] = madd(acc[j], x, y);
        vf rest{};
        for (vf& a : acc) rest += a;
        asm volatile("" : : "m"(rest));
#pragma omp single
        threads = omp_get_num_threads();
    }
    return threads * rounds * CHAINS * LANES * 2;
}
}
