// Attention of single rows over a paged cache, in splits of a fixed number of keys that are joined in their order.
// What a row gets depends on its own queries and keys only, whoever else is in the pass.
#pragma once

#include <cmath>

#include "vectors.h"

constexpr int64_t SPLIT = 256;

// Where a row's keys lie: pages of its session in order.
struct Keys {
    const float *keys, *values;  // [pages * page_size, kv_heads, dim]
    const int64_t* table;        // [pages of the session]
    int64_t page_size, kv_heads, dim;

    int64_t offset(int64_t position, int64_t head) const {
        const int64_t slot = table[position / page_size] * page_size + position % page_size;
        return (slot * kv_heads + head) * dim;
    }
};

// One split of one KV head for the `group` queries that share it: queries [group, dim] -> partial [group, dim + 2],
// the weighted values, then the largest score and the sum of weights.
inline void attend_split(const float* queries, int64_t group, const Keys& k, int64_t head, int64_t first, int64_t last,
                         float scale, float* partial) {
    const int64_t count = last - first, dim = k.dim;
    alignas(64) float weight[SPLIT];
    for (int64_t g = 0; g < group; ++g) {
        float* out = partial + g * (dim + 2);
        float largest = -INFINITY, total = 0;
        for (int64_t i = 0; i < count; ++i) {
            weight[i] = scale * dot(queries + g * dim, k.keys + k.offset(first + i, head), dim);
            largest = weight[i] > largest ? weight[i] : largest;
        }
        for (int64_t i = count; i % LANES; ++i) weight[i] = largest;  // fills the last vector
        for (int64_t i = 0; i < count; i += LANES) store(weight + i, exp(load(weight + i) - largest));
        std::memset(out, 0, dim * sizeof(float));
        for (int64_t i = 0; i < count; ++i) {
            const float* value = k.values + k.offset(first + i, head);
            total += weight[i];
            int64_t d = 0;
            for (; d + LANES <= dim; d += LANES) store(out + d, load(out + d) + load(value + d) * weight[i]);
            for (; d < dim; ++d) out[d] += value[d] * weight[i];
        }
        out[dim] = largest;
        out[dim + 1] = total;
    }
}

// The splits of one query -> its values [dim]. `stride` floats lie between the partials of consecutive splits.
inline void join_splits(const float* partial, int64_t splits, int64_t stride, int64_t dim, float* out) {
    float largest = -INFINITY, total = 0;
    for (int64_t s = 0; s < splits; ++s) largest = std::fmax(largest, partial[s * stride + dim]);
    std::memset(out, 0, dim * sizeof(float));
    for (int64_t s = 0; s < splits; ++s) {
        const float* from = partial + s * stride;
        const float share = std::exp(from[dim] - largest);
        total += share * from[dim + 1];
        for (int64_t d = 0; d < dim; ++d) out[d] += share * from[d];
    }
    const float scale = 1 / total;
    for (int64_t d = 0; d < dim; ++d) out[d] *= scale;
}
