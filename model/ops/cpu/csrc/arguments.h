// From pointers and flags, as C has them, to the Layer<X, Y> that computes: X and Y are bf16 or float.
//
// Knows no layer and no weights.
#pragma once
#include "panels.h"

struct Arguments {
    const void* x;
    bool x_bf16;
    const void* weights;
    const float* bias;
    void* y;
    bool y_bf16;
    Shape shape;
};

template <template <class X, class Y> class Layer, class X, class Y>
static void run_typed(const Arguments& a) {
    run(Layer<X, Y>{a.shape, static_cast<const uint8_t*>(a.weights), static_cast<const X*>(a.x), a.bias,
                    static_cast<Y*>(a.y)});
}

template <template <class X, class Y> class Layer>
static Outcome run_as(const Arguments& a) {
    return outcome_of([&] {
        if (a.x_bf16)
            a.y_bf16 ? run_typed<Layer, bf16, bf16>(a) : run_typed<Layer, bf16, float>(a);
        else
            a.y_bf16 ? run_typed<Layer, float, bf16>(a) : run_typed<Layer, float, float>(a);
    });
}
