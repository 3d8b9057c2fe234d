// Vectors of floats as the compiler's own extension: AVX-512, AVX2 or NEON, whatever the machine has.
// Every reduction here runs in one fixed order, whatever the shape of the work around it.
#pragma once

#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
constexpr int64_t LANES = 16;
#else
constexpr int64_t LANES = 8;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));

inline vec load(const float* from) {
    vec v;
    std::memcpy(&v, from, sizeof v);
    return v;
}

// The first `count` < LANES lanes; the others are zero.
inline vec load_part(const float* from, int64_t count) {
    vec v{};
    std::memcpy(&v, from, count * sizeof(float));
    return v;
}

inline void store(float* to, vec v) { std::memcpy(to, &v, sizeof v); }

// Lanes are added pairwise, halves first.
inline float sum(vec v) {
    typedef float vec4 __attribute__((vector_size(16)));
#ifdef __AVX512F__
    typedef float vec8 __attribute__((vector_size(32)));
    const vec8 eight = __builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7) +
                       __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    const vec eight = v;
#endif
    const vec4 four = __builtin_shufflevector(eight, eight, 0, 1, 2, 3) + __builtin_shufflevector(eight, eight, 4, 5, 6, 7);
    return (four[0] + four[2]) + (four[1] + four[3]);
}

inline float dot(const float* a, const float* b, int64_t count) {
    vec total{};
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) total += load(a + i) * load(b + i);
    if (i < count) total += load_part(a + i, count - i) * load_part(b + i, count - i);
    return sum(total);
}

// e^x to float32 rounding, for x clamped to [-87, 88]: 2^n times a polynomial in the rest (Cephes, expf).
inline vec exp(vec x) {
    const vec low = vec{} - 87.0f, high = vec{} + 88.0f;
    x = x < low ? low : x;
    x = x > high ? high : x;
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
    const vec n = (x * 1.44269504f + to_integer) - to_integer;
    const vec r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec p = vec{} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    const ivec power = (__builtin_convertvector(n, ivec) + 127) << 23;
    vec scale;
    std::memcpy(&scale, &power, sizeof scale);
    return p * scale;
}
