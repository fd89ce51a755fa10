// What encoders of the BERT kind need beside the rest: layer norm with the addition before it, and GELU in its exact (erf) form.
// Rows are independent; a row's sums have one fixed order.
#ifndef TW_LEVEL
#define TW_SOURCE "encoder.cpp"
#include "each_level.h"

// x, delta (0: none), weight, bias, columns, eps, out, count
TW_OP(add_layer_norm, 8) {
    auto row = TW_PICK(t, add_layer_norm_row);
    const int64_t columns = a[4].i;
    tw::Thread::Range part = t.share(tw::live(a[7]));
    for (int64_t i = part.begin; i < part.end; ++i) {
        float* delta = a[1].p ? tw::ptr<float>(a[1]) + i * columns : nullptr;
        row(tw::ptr<float>(a[0]) + i * columns, delta, tw::ptr<float>(a[2]), tw::ptr<float>(a[3]), columns, (float)a[5].f,
            tw::ptr<float>(a[6]) + i * columns);
    }
}

// x, columns, count
TW_OP(gelu, 3) {
    auto piece = TW_PICK(t, gelu_piece);
    tw::Thread::Range part = t.share(tw::live(a[2]) * a[1].i, 16);
    piece(tw::ptr<float>(a[0]) + part.begin, part.end - part.begin);
}

#else
namespace tw {
namespace TW_NS {
namespace {

// One pass of `body(at, count)` over a row in vectors; the last may be shorter.
template <class Body>
TW_INLINE void by_vectors(int64_t n, Body&& body) {
    int64_t i = 0;
    for (; i + W <= n; i += W) body(i, W);
    if (i < n) body(i, n - i);
}
TW_INLINE Vec take(const float* p, int64_t n) { return n == W ? load(p) : load_part(p, n, 0); }
TW_INLINE void put(float* p, int64_t n, Vec v) {
    if (n == W) store(p, v);
    else store_part(p, n, v);
}

// x += delta; out = (x - mean) / sqrt(variance + eps) * weight + bias. out may be x or delta: every value is read before it is written.
// The variance is summed over differences from the mean, in a second pass: the difference of two large sums would lose it.
void add_layer_norm_row(float* x, const float* delta, const float* weight, const float* bias, int64_t n, float eps, float* out) {
    Vec total{};
    by_vectors(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        Vec v = take(x + i, count);
        if (delta) {
            v += take(delta + i, count);
            put(x + i, count, v);
        }
        total += v;
    });
    const Vec mean = splat(sum(total) / (float)n);
    Vec squares{};
    by_vectors(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        Vec v = take(x + i, count) - mean;
        if (count < W) v = select(iota() < (int32_t)count, v, splat(0));
        squares = fma(v, v, squares);
    });
    const Vec inverse = splat(1.f / __builtin_sqrtf(sum(squares) / (float)n + eps));
    by_vectors(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) {
        put(out + i, count, fma((take(x + i, count) - mean) * inverse, take(weight + i, count), take(bias + i, count)));
    });
}

// x Phi(x) = x erfc(-x / sqrt 2) / 2. erfc(z) of z >= 0 is a polynomial in 1 / (1 + 0.3275911 z) times exp(-z^2), with an error of at most
// 1.5e-7 (Abramowitz & Stegun 7.1.26); of z < 0 it is 2 - erfc(-z).
TW_INLINE Vec gelu_of(Vec x) {
    const Vec z = floats(bits(x) & splat_int(0x7fffffff)) * splat(0.70710678f);
    const Vec r = splat(1) / fma(splat(0.3275911f), z, splat(1));
    Vec p = fma(splat(1.061405429f), r, splat(-1.453152027f));
    p = fma(p, r, splat(1.421413741f));
    p = fma(p, r, splat(-0.284496736f));
    p = fma(p, r, splat(0.254829592f));
    const Vec half_erfc = splat(0.5f) * p * r * exp(splat(0) - z * z);
    const Vec result = x * select(x < 0, half_erfc, splat(1) - half_erfc);
    return select(x < -20, splat(0), result);  // -inf too: 0 times it would be NaN
}

void gelu_piece(float* x, int64_t n) {
    by_vectors(n, [&](int64_t i, int64_t count) __attribute__((always_inline)) { put(x + i, count, gelu_of(take(x + i, count))); });
}

}  // namespace
}  // namespace TW_NS
}  // namespace tw
#endif
