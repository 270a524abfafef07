// From rows of x to the stream of words that a tile reads: [word][part][row].
//
// Knows no layers. Squares of words are turned over in registers; stores overlap and run upwards, so a buffer needs room
// for SIDE words behind the last.
#pragma once
#include <algorithm>

#include "tile.h"

#if defined(__AVX2__)
constexpr int SIDE = 8;
#else
constexpr int SIDE = 4;
#endif

typedef uint32_t words __attribute__((vector_size(SIDE * 4)));
typedef int16_t shorts __attribute__((vector_size(SIDE * 4)));

// ---- what becomes of a word -----------------------------------------------------------------------------------------
struct Whole {
    static constexpr int PARTS = 1;
    static words part(words x, int) { return x; }
};

struct Bf16Halves {  // a pair of bf16 -> two floats
    static constexpr int PARTS = 2;
    static words part(words x, int part) { return part ? x & 0xffff0000u : x << 16; }
};

struct ByteHalves {  // a quad of bytes -> bytes 0 and 2, then 1 and 3, widened to 16 bits
    static constexpr int PARTS = 2;
    static words part(words x, int part) { return (words)((part ? (shorts)x : (shorts)(x << 8)) >> 8); }
};

// Words [i, i + SIDE) of a row of so many bytes, zeros beyond.
static inline words words_at(const uint8_t* row, int64_t i, int64_t row_bytes) {
    if ((i + SIDE) * 4 <= row_bytes) return load<words>(row + i * 4);
    words padded{};
    if (i * 4 < row_bytes) memcpy(&padded, row + i * 4, row_bytes - i * 4);
    return padded;
}

static inline void transpose(words* v) {
#if defined(__AVX2__)
    __m256 pairs[SIDE], quads[SIDE];
    for (int i = 0; i < SIDE; i += 2) {
        pairs[i] = _mm256_unpacklo_ps((__m256)v[i], (__m256)v[i + 1]);
        pairs[i + 1] = _mm256_unpackhi_ps((__m256)v[i], (__m256)v[i + 1]);
    }
    for (int i = 0; i < SIDE; i += 4)
        for (int j = 0; j < 2; j++) {
            quads[i + 2 * j] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0x44);
            quads[i + 2 * j + 1] = _mm256_shuffle_ps(pairs[i + j], pairs[i + j + 2], 0xee);
        }
    for (int i = 0; i < 4; i++) {
        v[i] = (words)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x20);
        v[i + 4] = (words)_mm256_permute2f128_ps(quads[i], quads[i + 4], 0x31);
    }
#else
    uint32_t copy[SIDE][SIDE];
    memcpy(copy, v, sizeof copy);
    for (int i = 0; i < SIDE; i++)
        for (int j = 0; j < SIDE; j++) v[i][j] = copy[j][i];
#endif
}

// rows rows, row_bytes apart and as long, as word_count words each.
template <class Expand>
static void interleave(const uint8_t* x, int64_t row_bytes, int rows, int64_t word_count, uint32_t* out) {
    constexpr int SQUARES = (MAX_ROWS + SIDE - 1) / SIDE;
    words square[SQUARES][SIDE];
    for (int64_t i = 0; i < word_count; i += SIDE) {
        for (int first = 0; first < rows; first += SIDE) {
            words* v = square[first / SIDE];
            for (int r = 0; r < SIDE; r++)
                v[r] = first + r < rows ? words_at(x + (first + r) * row_bytes, i, row_bytes) : words{};
            transpose(v);
        }
        for (int j = 0; j < std::min<int64_t>(SIDE, word_count - i); j++)
            for (int part = 0; part < Expand::PARTS; part++)
                for (int first = 0; first < rows; first += SIDE)
                    store(out + ((i + j) * Expand::PARTS + part) * rows + first,
                          Expand::part(square[first / SIDE][j], part));
    }
}
