// A lack of memory, on its way from where it happens to the caller of the library.
//
// Knows no operation. An operation returns an Outcome: exceptions leave neither the library nor a thread of OpenMP.
#pragma once
#include <atomic>
#include <new>

enum Outcome : int { DONE, OUT_OF_MEMORY };  // mirrored in model/ops/cpu/native.py; the latter: outputs are of no use

template <class Body>
static Outcome outcome_of(Body body) {
    try {
        body();
        return DONE;
    } catch (const std::bad_alloc&) {
        return OUT_OF_MEMORY;
    }
}

static inline void must(int outcome) {
    if (outcome != DONE) throw std::bad_alloc();
}

// Of any thread of a parallel region: each watches its own work, then the caller asks.
class Shortage {
public:
    template <class Body>
    void watch(Body body) {
        if (outcome_of(body) != DONE) happened_ = true;
    }

    Outcome outcome() const { return happened_ ? OUT_OF_MEMORY : DONE; }

private:
    std::atomic<bool> happened_{false};
};
