// x . W^T for few rows: every weight is read from memory once, in the order in which it lies there.
// An output depends on its own row and column only, bit for bit, however many rows there are.
#pragma once

#include <algorithm>

#include "vectors.h"

// What one tile adds up at a time must fit the registers: rows * columns accumulators. Columns divide a chunk.
#ifdef __AVX512F__
constexpr int ACCUMULATORS = 24, MOST_ROWS = 6;
#else
constexpr int ACCUMULATORS = 12, MOST_ROWS = 3;
#endif
constexpr int columns_beside(int rows) { return 8 * rows <= ACCUMULATORS ? 8 : 4; }

template <int ROWS, int COLS, class Store>
inline void tile(const float* x, int64_t x_stride, const float* w, int64_t depth, Store store_at) {
    vec total[ROWS][COLS] = {};
    int64_t i = 0;
    for (; i + LANES <= depth; i += LANES) {
        vec column[COLS];
        for (int c = 0; c < COLS; ++c) {
            column[c] = load(w + c * depth + i);
            __builtin_prefetch(w + (c + COLS) * depth + i);  // the next tile's
        }
        for (int r = 0; r < ROWS; ++r) {
            const vec row = load(x + r * x_stride + i);
            for (int c = 0; c < COLS; ++c) total[r][c] += row * column[c];
        }
    }
    if (i < depth)
        for (int r = 0; r < ROWS; ++r)
            for (int c = 0; c < COLS; ++c)
                total[r][c] += load_part(x + r * x_stride + i, depth - i) * load_part(w + c * depth + i, depth - i);
    for (int r = 0; r < ROWS; ++r)
        for (int c = 0; c < COLS; ++c) store_at(r, c, sum(total[r][c]));
}

// COLS columns for all rows, ROWS of them at a time and then the rest.
template <int ROWS, int COLS, class Store>
inline void rows_by(const float* x, int64_t rows, int64_t x_stride, const float* w, int64_t depth, Store store_at) {
    int64_t r = 0;
    auto at = [&](int row, int c, float value) { store_at(r + row, c, value); };
    for (; r + ROWS <= rows; r += ROWS) tile<ROWS, COLS>(x + r * x_stride, x_stride, w, depth, at);
    if constexpr (ROWS > 1)
        if (r < rows) {
            auto rest = [&](int64_t row, int c, float value) { store_at(r + row, c, value); };
            rows_by<ROWS - 1, COLS>(x + r * x_stride, rows - r, x_stride, w, depth, rest);
        }
}

template <int ROWS, class Store>
inline void columns_by(const float* x, int64_t rows, int64_t x_stride, const float* w, int64_t depth, int64_t first,
                       int64_t last, Store store_at) {
    constexpr int COLS = columns_beside(ROWS);
    int64_t c = first;
    auto at = [&](int64_t row, int column, float value) { store_at(row, c + column, value); };
    for (; c + COLS <= last; c += COLS) rows_by<ROWS, COLS>(x, rows, x_stride, w + c * depth, depth, at);
    for (; c < last; ++c) rows_by<ROWS, 1>(x, rows, x_stride, w + c * depth, depth, at);
}

// store_at(row, column, value) for every row of x [rows, depth] and every column from `first` to before `last` of
// w [columns, depth].
template <int ROWS = MOST_ROWS, class Store>
inline void product(const float* x, int64_t rows, int64_t x_stride, const float* w, int64_t depth, int64_t first,
                    int64_t last, Store store_at) {
    const int64_t groups = (rows + MOST_ROWS - 1) / MOST_ROWS;
    if ((rows + groups - 1) / groups == ROWS) return columns_by<ROWS>(x, rows, x_stride, w, depth, first, last, store_at);
    if constexpr (ROWS > 1) product<ROWS - 1>(x, rows, x_stride, w, depth, first, last, store_at);
}
