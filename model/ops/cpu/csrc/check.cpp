// Whether the CPU's dot products of bytes and of bf16 do what their portable forms say; asked once, before the first use.
//
// Knows no layers. Where the library uses no such instruction the two forms are one.
#include <cmath>

#include "kinds.h"

namespace {

constexpr int STEPS = 64;

struct Bits {  // the same on every machine
    uint32_t state = 12345;

    vu next() {
        vu v;
        for (int i = 0; i < LANES; i++) v[i] = state = state * 1664525u + 1013904223u;
        return v;
    }
};

bool bytes_agree() {
    Bits bits;
    vi sum{}, expected{};
    for (int i = 0; i < STEPS; i++) {
        vi w = (vi)bits.next(), x = (vi)bits.next();
        sum = dot_bytes(w, x, sum);
        expected = dot_bytes_portable(w, x, expected);
    }
    return memcmp(&sum, &expected, sizeof sum) == 0;
}

bool pairs_agree() {  // up to the rounding of the instruction, which is its own
    Bits bits;
    vf sum{}, expected{};
    for (int i = 0; i < STEPS; i++) {
        vu w = (bits.next() & 0x807f807fu) | 0x3f803f80u, x = (bits.next() & 0x807f807fu) | 0x3f803f80u;  // +-1 to 2
        sum = dot_pairs(w, x, sum);
        expected = dot_pairs_portable(w, x, expected);
    }
    for (int i = 0; i < LANES; i++)
        if (!(std::fabs(sum[i] - expected[i]) < 1e-3f)) return false;
    return true;
}

bool roundings_agree() {
    Bits bits;
    for (int i = 0; i < STEPS; i++) {
        vf x = (vf)((bits.next() & 0x807fffffu) | 0x3f800000u);  // +-1 to 2
        vh ours = rounded(x), expected = rounded_portable(x);
        if (memcmp(&ours, &expected, sizeof ours) != 0) return false;
    }
    return true;
}

}  // namespace

extern "C" int rw_check_dots() { return bytes_agree() && pairs_agree() && roundings_agree(); }
