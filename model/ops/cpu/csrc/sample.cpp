// From logits to tokens: the best token, a filtered random draw, log-probabilities. A row is one thread's work.
//
// Knows no penalties and no requests. The same tokens as model/ops/reference_sampling.py: filters keep a prefix of the
// row's ranking (best first, ties to the lowest id), the draw inverts the running sum of the kept weights. Nothing is
// sorted but the bins in which a prefix or the draw ends.
#include <omp.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "ranking.h"
#include "shortage.h"

namespace {

struct Best {
    int64_t id;
    float value;
    bool finite;  // no NaN, no +inf, and not -inf everywhere
};

// One pass: a lane keeps its best and where it was; the first of equals wins within a lane and between lanes.
Best best_of(const float* x, int64_t n) {
    vf best = splat(-__builtin_inff()), sound = splat(0.0f);
    vi at{}, block{};
    for (int64_t i = 0; i < n; i += LANES, block += 1) {
        vf value = n - i >= LANES ? load<vf>(x + i) : load_tail(x + i, int(n - i));
        sound = value == value ? sound : value;
        at = value > best ? block : at;
        best = value > best ? value : best;
    }
    Best found{0, best[0], true};
    for (int lane = 0; lane < LANES; lane++) {
        int64_t id = int64_t(at[lane]) * LANES + lane;
        if (lane == 0 || best[lane] > found.value || (best[lane] == found.value && id < found.id))
            found.id = id, found.value = best[lane];
        found.finite &= sound[lane] == sound[lane];
    }
    found.finite &= std::isfinite(found.value);
    return found.finite ? found : Best{0, 0.0f, false};
}

// ---- log-probabilities -----------------------------------------------------------------------------------------------
double log_of_sum(const float* x, int64_t n, float top) {
    double total = 0.0;
    for (int64_t start = 0; start < n; start += RUN) {
        vf acc{};
        for (int64_t i = start; i < std::min(start + RUN, n); i += LANES)
            acc += weight_of((n - i >= LANES ? load<vf>(x + i) : load_tail(x + i, int(n - i))) - top);
        total += sum(acc);
    }
    return std::log(total);
}

struct Scored {
    float value;
    int64_t id;
    bool operator<(const Scored& other) const { return value > other.value || (value == other.value && id < other.id); }
};

// The `count` best of a row, best first: a heap with the worst of the chosen on top.
void best_few(const float* x, int64_t n, int64_t count, std::vector<Scored>& chosen) {
    chosen.clear();
    for (int64_t i = 0; i < count; i++) chosen.push_back({x[i], i});
    std::make_heap(chosen.begin(), chosen.end());
    for (int64_t i = count; i < n; i++)
        if (x[i] > chosen[0].value) {
            std::pop_heap(chosen.begin(), chosen.end());
            chosen.back() = {x[i], i};
            std::push_heap(chosen.begin(), chosen.end());
        }
    std::sort_heap(chosen.begin(), chosen.end());
}

struct Logprobs {
    float *chosen, *top;  // [rows], [rows][count]
    int64_t *top_ids, count;
};

void logprobs(const float* x, int64_t n, int64_t row, int64_t id, Logprobs out) {
    Best best = best_of(x, n);
    static thread_local std::vector<float> flat;
    if (!best.finite) x = (flat.assign(n, 0.0f), flat.data());  // what such a row reports means nothing
    double whole = log_of_sum(x, n, best.value);
    auto of = [&](float logit) { return float(double(logit - best.value) - whole); };
    out.chosen[row] = of(x[id]);
    if (out.count == 0) return;
    static thread_local std::vector<Scored> few;
    best_few(x, n, out.count, few);
    for (int64_t i = 0; i < out.count; i++) {
        out.top_ids[row * out.count + i] = few[i].id;
        out.top[row * out.count + i] = of(few[i].value);
    }
}

// ---- the draw --------------------------------------------------------------------------------------------------------
// Philox4x32-10, the first word, as a number in (0, 1): see model/ops/philox.py.
double uniform(uint64_t seed, uint32_t choice, uint32_t index) {
    uint32_t c[4] = {index, choice, 0, 0}, key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        uint64_t a = uint64_t(c[0]) * 0xD2511F53u, b = uint64_t(c[2]) * 0xCD9E8D57u;
        c[0] = uint32_t(b >> 32) ^ c[1] ^ key[0], c[1] = uint32_t(b);
        c[2] = uint32_t(a >> 32) ^ c[3] ^ key[1], c[3] = uint32_t(a);
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    return (double(c[0]) + 0.5) / 4294967296.0;
}

struct Settings {  // of one row
    float temperature, top_p, min_p;
    int64_t top_k;

    bool filters() const { return top_k > 0 || top_p < 1.0f || min_p > 0.0f; }
};

int64_t draw(const float* x, int64_t n, float top, Settings s, double point) {
    static thread_local Ranking ranking;
    ranking.weigh(x, n, top, s.temperature, s.filters());
    if (!s.filters()) return ranking.at_index(point);
    int64_t kept = s.top_k > 0 ? std::min(s.top_k, n) : n;
    if (s.min_p > 0.0f) kept = std::min(kept, std::max<int64_t>(1, ranking.count_from(s.min_p)));
    double total = ranking.sum_of(kept);
    if (s.top_p < 1.0f) {
        kept = std::min(kept, ranking.first_reaching(double(s.top_p) * total).rank + 1);
        total = ranking.sum_of(kept);
    }
    return ranking.first_beyond(point * total).id;
}

template <class Body>
Outcome each_row(int64_t rows, Body body) {
    Shortage shortage;
#pragma omp parallel for schedule(dynamic) if (rows > 1)
    for (int64_t r = 0; r < rows; r++) shortage.watch([&] { body(r); });
    return shortage.outcome();
}

}  // namespace

extern "C" {

// ids, finite [rows]; temperature 0 takes the best. logits [rows][n] f32.
int rw_sample(const float* logits, int64_t rows, int64_t n, const float* temperature, const int32_t* top_k,
              const float* top_p, const float* min_p, const int64_t* seed, const int64_t* choice, const int64_t* index,
              int64_t* ids, bool* finite) {
    return each_row(rows, [=](int64_t r) {
        Best best = best_of(logits + r * n, n);
        ids[r] = best.id, finite[r] = best.finite;
        if (temperature[r] > 0.0f && best.finite)
            ids[r] = draw(logits + r * n, n, best.value, {temperature[r], top_p[r], min_p[r], top_k[r]},
                          uniform(uint64_t(seed[r]), uint32_t(choice[r]), uint32_t(index[r])));
    });
}

int rw_finite(const float* logits, int64_t rows, int64_t n, bool* finite) {
    return each_row(rows, [=](int64_t r) { finite[r] = best_of(logits + r * n, n).finite; });
}

int rw_logprobs(const float* logits, int64_t rows, int64_t n, const int64_t* ids, float* chosen, int64_t* top_ids,
                float* top, int64_t count) {
    return each_row(rows, [=](int64_t r) { logprobs(logits + r * n, n, r, ids[r], {chosen, top, top_ids, count}); });
}
}
