// Rotary position embedding, with the norm before it and the write of keys and values after it.
#ifndef TW_LEVEL
#define TW_SOURCE "rope.cpp"
#include "each_level.h"

// positions, inv_freq, width / 2, scale, out, count
TW_OP(rope_angles, 6) {
    const int64_t half = a[2].i;
    const float* inv_freq = tw::ptr<float>(a[1]);
    tw::Thread::Range part = t.share(tw::live(a[5]));
    for (int64_t i = part.begin; i < part.end; ++i) {
        float* out = tw::ptr<float>(a[4]) + i * 2 * half;
        float position = (float)tw::ptr<int32_t>(a[0])[i];
        for (int64_t j = 0; j < half; ++j) {
            float angle = position * inv_freq[j];  // float32 as in the reference implementations; the models were trained with it
            out[j] = (float)(a[3].f * std::cos((double)angle));
            out[half + j] = (float)(a[3].f * std::sin((double)angle));
        }
    }
}

// qkv, angles, angles' width, write_slots, k, v, format, page tokens, G, D, H, q weight (0: none), k weight (0: none), eps, out, count
TW_OP(rope_store, 16) {
    auto tokens = a[6].i == 0 ? TW_PICK(t, rope_store_f32) : a[6].i == 1 ? TW_PICK(t, rope_store_f16) : TW_PICK(t, rope_store_bf16);
    // Multiples of 16 tokens where there are many: 16 keys of a page share cache lines.
    int64_t n = tw::live(a[15]);
    tw::Thread::Range part = t.share(n, n >= 16 * t.count ? 16 : 1);
    tokens(a, part.begin, part.end);
}

#else
namespace tw {
namespace TW_NS {
namespace {

void norm_head(const float* x, const float* weight, int64_t dim, float eps, float* out) {
    Vec squares{};
    for (int64_t i = 0; i < dim; i += W) squares = fma(load(x + i), load(x + i), squares);
    Vec inverse = splat(1.f / __builtin_sqrtf(sum(squares) / (float)dim + eps));
    for (int64_t i = 0; i < dim; i += W) store(out + i, load(x + i) * inverse * load(weight + i));
}

// Rotates the pairs (i, i + half) of the first 2 * half dims; x and out may be the same.
void rotate_head(const float* x, const float* angles, int64_t half, int64_t dim, float* out) {
    const float *cosine = angles, *sine = angles + half;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        Vec first = load(x + i), second = load(x + half + i), c = load(cosine + i), s = load(sine + i);
        store(out + i, first * c - second * s);
        store(out + half + i, second * c + first * s);
    }
    for (; i < half; ++i) {
        float first = x[i], second = x[half + i];
        out[i] = first * cosine[i] - second * sine[i];
        out[half + i] = second * cosine[i] + first * sine[i];
    }
    if (x != out)
        for (i = 2 * half; i < dim; ++i) out[i] = x[i];
}

template <class Format>
void rope_store(const Word* a, int64_t begin, int64_t end) {
    typedef typename Format::Stored Stored;
    const int64_t width = a[2].i, page_tokens = a[7].i, kv_heads = a[8].i, dim = a[9].i, heads = a[10].i;
    const float *q_weight = ptr<float>(a[11]), *k_weight = ptr<float>(a[12]);
    const float eps = (float)a[13].f;
    alignas(64) float head[1024];
    for (int64_t t = begin; t < end; ++t) {
        const float* in = ptr<float>(a[0]) + t * (heads + 2 * kv_heads) * dim;
        const float* angles = ptr<float>(a[1]) + t * width;
        float* out = ptr<float>(a[14]) + t * heads * dim;
        for (int64_t h = 0; h < heads; ++h, in += dim, out += dim) {
            if (q_weight) norm_head(in, q_weight, dim, eps, out);
            rotate_head(q_weight ? out : in, angles, width / 2, dim, out);
        }
        const int64_t slot = ptr<int32_t>(a[3])[t], page = slot / page_tokens, at = slot % page_tokens;
        // k is [pages, G, B / 16, D, 16], v is [pages, G, B, D].
        Stored* k = ptr<Stored>(a[4]) + page * kv_heads * page_tokens * dim + at / 16 * dim * 16 + at % 16;
        for (int64_t g = 0; g < kv_heads; ++g, in += dim, k += page_tokens * dim) {
            if (k_weight) norm_head(in, k_weight, dim, eps, head);
            rotate_head(k_weight ? head : in, angles, width / 2, dim, head);
            for (int64_t d = 0; d < dim; ++d) k[d * 16] = Format::put(head[d]);
        }
        Stored* v = ptr<Stored>(a[5]) + page * kv_heads * page_tokens * dim + at * dim;
        for (int64_t g = 0; g < kv_heads; ++g, in += dim, v += page_tokens * dim)
            for (int64_t d = 0; d < dim; ++d) v[d] = Format::put(in[d]);
    }
}
void rope_store_f32(const Word* a, int64_t begin, int64_t end) { rope_store<F32>(a, begin, end); }
void rope_store_f16(const Word* a, int64_t begin, int64_t end) { rope_store<F16>(a, begin, end); }
void rope_store_bf16(const Word* a, int64_t begin, int64_t end) { rope_store<BF16>(a, begin, end); }

}  // namespace
}  // namespace TW_NS
}  // namespace tw
#endif
