// Which outputs of a linear layer a tile makes, and how they get to y.
//
// Knows neither how they were summed nor who computes which.
#pragma once
#include "tile.h"

struct Shape {
    int64_t m, n, k;

    int panels() const { return int((n + PANEL - 1) / PANEL); }
};

// c [rows][panels * PANEL], with the bias added, to y's columns of panel and after; what c holds beyond the last is left out.
template <class Y>
static inline void put_outputs(const Shape& s, int64_t row, int rows, int panel, int panels, const float* c,
                               const float* bias, Y* y) {
    int64_t column = int64_t(panel) * PANEL, left = s.n - column;
    int columns = int(left < panels * PANEL ? left : panels * PANEL);
    for (int r = 0; r < rows; r++)
        for (int j = 0; j < columns; j += LANES) {
            vf value = load<vf>(c + r * panels * PANEL + j);
            if (bias) value += load_at(bias + column, j, columns);
            store_at(y + (row + r) * s.n + column, j, columns, value);
        }
}
