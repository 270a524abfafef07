// The weights of a row's tokens, and questions about their ranking that need no sort of the whole row.
//
// Knows no filters. A token's bin is how far its scaled logit lies below the best, in steps of 1 / STEPS; a bin is sorted
// only when an answer lies inside it. Sums are f64.
#pragma once
#include <algorithm>
#include <cmath>
#include <vector>

#include "vec.h"

constexpr int64_t RUN = 1024;  // weights whose sum is taken before it is added to the rest
constexpr int STEPS = 64, BINS = 2048;

// The last vector of a row: -inf beyond its n < LANES elements.
static inline vf load_tail(const float* x, int n) {
    float padded[LANES];
    std::fill_n(padded, LANES, -__builtin_inff());
    std::copy_n(x, n, padded);
    return load<vf>(padded);
}

// e^x for x <= 0; zero from where floats end.
static inline vf weight_of(vf x) { return x < -87.0f ? vf{} : exp2_of<true>(x * 1.44269504088896341f); }

class Ranking {
public:
    struct Place {
        int64_t rank, id;
    };

    // Weights e^((x - top) / temperature). binned: the ranking will be asked for.
    void weigh(const float* x, int64_t n, float top, float temperature, bool binned) {
        count_ = n;
        int64_t padded = (n + LANES - 1) / LANES * LANES;
        scaled_.resize(padded), weight_.resize(padded), bin_.resize(padded);
        for (int64_t i = 0; i < n; i += LANES) {
            vf value = ((n - i >= LANES ? load<vf>(x + i) : load_tail(x + i, int(n - i))) - top) / temperature;
            store(&scaled_[i], value);
            store(&weight_[i], weight_of(value));
            vf depth = value * -float(STEPS);
            store(&bin_[i], __builtin_convertvector(depth < float(BINS - 1) ? depth : splat(BINS - 1), vi));
        }
        if (binned) fill_bins();
    }

    // The token at which the running sum in index order passes this share of the whole.
    int64_t at_index(double share) const {
        std::vector<double> runs;
        double whole = 0.0;
        for (int64_t start = 0; start < count_; start += RUN) runs.push_back(whole += run_sum(start));
        double target = share * whole;
        int64_t run = std::upper_bound(runs.begin(), runs.end(), target) - runs.begin(), i = run * RUN;
        double sum = run ? runs[run - 1] : 0.0;
        int64_t last = i;  // rounding inside a run may leave the target unreached: its last token of any weight
        for (; i < std::min(run * RUN + RUN, count_); i++) {
            if (weight_[i] > 0.0f) last = i;
            if ((sum += weight_[i]) > target) return i;
        }
        return last;
    }

    int64_t count_from(float weight) const {
        return std::count_if(weight_.begin(), weight_.begin() + count_, [&](float w) { return w >= weight; });
    }

    // The summed weight of the first `count` ranks.
    double sum_of(int64_t count) {
        if (count >= count_) return sum_before_[BINS];
        int bin = int(std::upper_bound(ranks_before_.begin(), ranks_before_.end(), count) - ranks_before_.begin()) - 1;
        double sum = sum_before_[bin];
        if (count == ranks_before_[bin]) return sum;
        sort_bin(bin);
        for (int64_t i = 0; i < count - ranks_before_[bin]; i++) sum += weight_[sorted_[i]];
        return sum;
    }

    Place first_reaching(double target) { return first([&](double sum) { return sum >= target; }); }
    Place first_beyond(double target) { return first([&](double sum) { return sum > target; }); }

private:
    int64_t count_ = 0;
    std::vector<float> scaled_, weight_;
    std::vector<int32_t> bin_;
    std::vector<int64_t> ranks_before_;  // [BINS + 1]
    std::vector<double> sum_before_;     // [BINS + 1]
    std::vector<int64_t> sorted_;        // tokens of the bin last sorted

    double run_sum(int64_t start) const {
        vf acc{};
        for (int64_t i = start; i < std::min(start + RUN, count_); i += LANES) acc += load<vf>(&weight_[i]);
        return sum(acc);
    }

    void fill_bins() {
        ranks_before_.assign(BINS + 1, 0), sum_before_.assign(BINS + 1, 0.0);
        for (int64_t i = 0; i < count_; i++) ranks_before_[bin_[i] + 1]++, sum_before_[bin_[i] + 1] += weight_[i];
        for (int b = 0; b < BINS; b++) ranks_before_[b + 1] += ranks_before_[b], sum_before_[b + 1] += sum_before_[b];
    }

    void sort_bin(int bin) {
        sorted_.clear();
        for (int64_t i = 0; i < count_; i++)
            if (bin_[i] == bin) sorted_.push_back(i);
        std::stable_sort(sorted_.begin(), sorted_.end(), [&](int64_t a, int64_t b) { return scaled_[a] > scaled_[b]; });
    }

    // The first rank whose running sum is enough; the last of any weight if rounding leaves none.
    template <class Enough>
    Place first(Enough enough) {
        int bin = 0, heaviest = 0;
        for (; bin < BINS && !enough(sum_before_[bin + 1]); bin++)
            if (sum_before_[bin + 1] > sum_before_[bin]) heaviest = bin;
        if (bin == BINS) bin = heaviest;
        sort_bin(bin);
        double sum = sum_before_[bin];
        Place place{ranks_before_[bin], sorted_.front()};
        for (size_t i = 0; i < sorted_.size(); i++) {
            if (i == 0 || weight_[sorted_[i]] > 0.0f) place = {ranks_before_[bin] + int64_t(i), sorted_[i]};
            if (enough(sum += weight_[sorted_[i]])) break;
        }
        return place;
    }
};
