// Adding to the residual stream, RMS norm, scaling (by position too), soft caps, gathering rows. Rows are independent; a row's sum of squares has one fixed order.
#ifndef TW_LEVEL
#define TW_SOURCE "norm.cpp"
#include "each_level.h"

// x, delta (0: none), weight, columns, eps, out, count
TW_OP(add_rms_norm, 7) {
    auto row = TW_PICK(t, add_rms_norm_row);
    const int64_t columns = a[3].i;
    tw::Thread::Range part = t.share(tw::live(a[6]));
    for (int64_t i = part.begin; i < part.end; ++i) {
        float* delta = a[1].p ? tw::ptr<float>(a[1]) + i * columns : nullptr;
        row(tw::ptr<float>(a[0]) + i * columns, delta, tw::ptr<float>(a[2]), columns, (float)a[4].f, tw::ptr<float>(a[5]) + i * columns);
    }
}

// x, delta (0: none), gate (0: none), columns, out (0: none), count
TW_OP(add, 6) {
    auto row = TW_PICK(t, add_row);
    const int64_t columns = a[3].i;
    tw::Thread::Range part = t.share(tw::live(a[5]));
    for (int64_t i = part.begin; i < part.end; ++i) {
        const float gate = a[2].p ? 1.f / (1.f + std::exp(-tw::ptr<float>(a[2])[i])) : 1.f;
        row(tw::ptr<float>(a[0]) + i * columns, a[1].p ? tw::ptr<float>(a[1]) + i * columns : nullptr, gate, columns,
            a[4].p ? tw::ptr<float>(a[4]) + i * columns : nullptr);
    }
}

// x, columns, start, weight, length of the span, eps, count
TW_OP(rms_norm_span, 7) {
    auto row = TW_PICK(t, add_rms_norm_row);
    tw::Thread::Range part = t.share(tw::live(a[6]));
    for (int64_t i = part.begin; i < part.end; ++i) {
        float* x = tw::ptr<float>(a[0]) + i * a[1].i + a[2].i;
        row(x, nullptr, tw::ptr<float>(a[3]), a[4].i, (float)a[5].f, x);
    }
}

// x, columns, factor, count
TW_OP(scale, 4) {
    auto piece = TW_PICK(t, scale_piece);
    tw::Thread::Range part = t.share(tw::live(a[3]) * a[1].i, 16);
    piece(tw::ptr<float>(a[0]) + part.begin, part.end - part.begin, (float)a[2].f);
}

// x, columns, positions, every, slope, count
TW_OP(temper, 6) {
    auto piece = TW_PICK(t, scale_piece);
    const int64_t columns = a[1].i;
    tw::Thread::Range part = t.share(tw::live(a[5]));
    for (int64_t i = part.begin; i < part.end; ++i) {
        const int64_t steps = (tw::ptr<int32_t>(a[2])[i] + int64_t(1)) / a[3].i;
        if (steps > 0) piece(tw::ptr<float>(a[0]) + i * columns, columns, float(1 + a[4].f * std::log1p(double(steps))));
    }
}

// x, columns, cap, count
TW_OP(softcap, 4) {
    auto piece = TW_PICK(t, softcap_piece);
    // Cut through rows: logits have few rows and many columns.
    tw::Thread::Range part = t.share(tw::live(a[3]) * a[1].i, 16);
    piece(tw::ptr<float>(a[0]) + part.begin, part.end - part.begin, (float)a[2].f);
}

// x, index, columns, out, count
TW_OP(gather_rows, 5) {
    const int64_t columns = a[2].i;
    tw::Thread::Range part = t.share(tw::live(a[4]));
    for (int64_t i = part.begin; i < part.end; ++i)
        std::memcpy(tw::ptr<float>(a[3]) + i * columns, tw::ptr<float>(a[0]) + tw::ptr<int32_t>(a[1])[i] * columns, columns * sizeof(float));
}

// pages (bytes), bytes per page, source ids, target ids, number of copies; targets must not be sources
TW_OP(copy_pages, 5) {
    const int64_t bytes = a[1].i;
    tw::Thread::Range part = t.share(a[4].i);
    for (int64_t i = part.begin; i < part.end; ++i)
        std::memcpy(tw::ptr<char>(a[0]) + tw::ptr<int32_t>(a[3])[i] * bytes, tw::ptr<char>(a[0]) + tw::ptr<int32_t>(a[2])[i] * bytes, bytes);
}

#else
namespace tw {
namespace TW_NS {
namespace {

// x += gate * delta; out = x.
void add_row(float* x, const float* delta, float gate, int64_t n, float* out) {
    const Vec g = splat(gate);
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        Vec v = load(x + i);
        if (delta) store(x + i, v = fma(g, load(delta + i), v));
        if (out) store(out + i, v);
    }
    if (i < n) {
        Vec v = load_part(x + i, n - i, 0);
        if (delta) store_part(x + i, n - i, v = fma(g, load_part(delta + i, n - i, 0), v));
        if (out) store_part(out + i, n - i, v);
    }
}

void scale_piece(float* x, int64_t n, float factor) {
    const Vec f = splat(factor);
    int64_t i = 0;
    for (; i + W <= n; i += W) store(x + i, f * load(x + i));
    if (i < n) store_part(x + i, n - i, f * load_part(x + i, n - i, 0));
}

// x += delta; out = x / sqrt(mean(x^2) + eps) * weight. out may be delta, or x where nothing is added.
void add_rms_norm_row(float* x, const float* delta, const float* weight, int64_t n, float eps, float* out) {
    Vec squares[4] = {};
    int64_t i = 0;
    auto step = [&](int64_t at, Vec& acc) {
        Vec v = load(x + at);
        if (delta) {
            v += load(delta + at);
            store(x + at, v);
        }
        acc = fma(v, v, acc);
    };
    for (; i + 4 * W <= n; i += 4 * W)
        for (int lane = 0; lane < 4; ++lane) step(i + lane * W, squares[lane]);
    for (; i + W <= n; i += W) step(i, squares[0]);
    if (i < n) {
        Vec v = load_part(x + i, n - i, 0);
        if (delta) {
            v += load_part(delta + i, n - i, 0);
            store_part(x + i, n - i, v);
        }
        squares[1] = fma(v, v, squares[1]);
    }
    float total = sum((squares[0] + squares[1]) + (squares[2] + squares[3]));
    Vec inverse = splat(1.f / __builtin_sqrtf(total / (float)n + eps));
    for (i = 0; i + W <= n; i += W) store(out + i, load(x + i) * inverse * load(weight + i));
    if (i < n) store_part(out + i, n - i, load_part(x + i, n - i, 0) * inverse * load_part(weight + i, n - i, 0));
}

void softcap_piece(float* x, int64_t n, float cap) {
    Vec inverse = splat(1.f / cap), outer = splat(cap);
    int64_t i = 0;
    for (; i + W <= n; i += W) store(x + i, outer * tanh(load(x + i) * inverse));
    if (i < n) store_part(x + i, n - i, outer * tanh(load_part(x + i, n - i, 0) * inverse));
}

}  // namespace
}  // namespace TW_NS
}  // namespace tw
#endif
