// Rows of the embedding, gathered from the bytes of the file and widened to float32.
//
// Block layouts are those of the GGUF specification: every block holds its scales (float16) beside its small quants.
#ifndef TW_LEVEL
#define TW_SOURCE "embed.cpp"
#include "each_level.h"

// ids, raw rows, format, columns, bytes per row, rows, scale, out, count. An id outside the table gives a row of zeros.
TW_OP(embed, 9) {
    auto widen = TW_PICK(t, widen_row);
    const int64_t columns = a[3].i;
    tw::Thread::Range part = t.share(tw::live(a[8]));
    for (int64_t i = part.begin; i < part.end; ++i) {
        int64_t id = tw::ptr<int32_t>(a[0])[i];
        float* out = tw::ptr<float>(a[7]) + i * columns;
        if (id < 0 || id >= a[5].i) std::memset(out, 0, columns * sizeof(float));
        else widen(tw::ptr<uint8_t>(a[1]) + id * a[4].i, a[2].i, columns, (float)a[6].f, out);
    }
}

#else
namespace tw {
namespace TW_NS {
namespace {

TW_INLINE uint16_t read16(const uint8_t* p) { return (uint16_t)(p[0] | p[1] << 8); }
TW_INLINE float half(const uint8_t* p) { return half_to_float(read16(p)); }

// The 6-bit scale and minimum of sub-block i of a Q4_K or Q5_K block: 12 bytes hold 8 of each.
TW_INLINE void scale_and_min(const uint8_t* s, int i, float& scale, float& minimum) {
    if (i < 4) {
        scale = s[i] & 63;
        minimum = s[i + 4] & 63;
    } else {
        scale = (s[i + 4] & 15) | (s[i - 4] >> 6) << 4;
        minimum = (s[i + 4] >> 4) | (s[i] >> 6) << 4;
    }
}

void widen_row(const uint8_t* p, int64_t format, int64_t n, float factor, float* out) {
    switch (format) {
        case 0:  // F32
            for (int64_t i = 0; i < n; ++i) {
                float x;
                __builtin_memcpy(&x, p + 4 * i, 4);
                out[i] = factor * x;
            }
            return;
        case 1:  // F16
            for (int64_t i = 0; i < n; ++i) out[i] = factor * half(p + 2 * i);
            return;
        case 2:  // BF16
            for (int64_t i = 0; i < n; ++i) out[i] = factor * bf16_to_float(read16(p + 2 * i));
            return;
        case 3:  // Q4_0: scale, 16 bytes of two quants - 8
            for (int64_t b = 0; b < n; b += 32, p += 18) {
                float d = half(p);
                for (int i = 0; i < 16; ++i) {
                    out[b + i] = factor * (d * (float)((p[2 + i] & 15) - 8));
                    out[b + 16 + i] = factor * (d * (float)((p[2 + i] >> 4) - 8));
                }
            }
            return;
        case 4:  // Q4_1: scale, minimum
            for (int64_t b = 0; b < n; b += 32, p += 20) {
                float d = half(p), m = half(p + 2);
                for (int i = 0; i < 16; ++i) {
                    out[b + i] = factor * (d * (float)(p[4 + i] & 15) + m);
                    out[b + 16 + i] = factor * (d * (float)(p[4 + i] >> 4) + m);
                }
            }
            return;
        case 5:    // Q5_0: scale, 32 fifth bits, quants - 16
        case 6: {  // Q5_1: scale, minimum, 32 fifth bits
            const int head = format == 5 ? 2 : 4;
            for (int64_t b = 0; b < n; b += 32, p += head + 20) {
                float d = half(p), m = format == 5 ? -16.f * d : half(p + 2);
                uint32_t fifth = (uint32_t)read16(p + head) | (uint32_t)read16(p + head + 2) << 16;
                const uint8_t* q = p + head + 4;
                for (int i = 0; i < 16; ++i) {
                    out[b + i] = factor * (d * (float)((q[i] & 15) | (fifth >> i & 1) << 4) + m);
                    out[b + 16 + i] = factor * (d * (float)((q[i] >> 4) | (fifth >> (i + 16) & 1) << 4) + m);
                }
            }
            return;
        }
        case 7:  // Q8_0: scale, int8
            for (int64_t b = 0; b < n; b += 32, p += 34) {
                float d = half(p);
                for (int i = 0; i < 32; ++i) out[b + i] = factor * (d * (float)(int8_t)p[2 + i]);
            }
            return;
        case 8:    // Q4_K: scale of scales, scale of minima, 8 x (6 + 6) bits, then 4 x 32 bytes: low halves, high halves
        case 9: {  // Q5_K: the same with 32 bytes of fifth bits before the quants
            const uint8_t fives = format == 9 ? 32 : 0;
            for (int64_t b = 0; b < n; b += 256, p += 144 + fives) {
                float d = half(p), dmin = half(p + 2);
                const uint8_t *scales = p + 4, *fifth = p + 16, *q = p + 16 + fives;
                for (int pair = 0; pair < 4; ++pair, q += 32) {
                    for (int high = 0; high < 2; ++high) {
                        float s, m;
                        const int sub = 2 * pair + high;
                        scale_and_min(scales, sub, s, m);
                        s *= d;
                        m *= dmin;
                        for (int i = 0; i < 32; ++i) {
                            int value = high ? q[i] >> 4 : q[i] & 15;
                            if (fives) value |= (fifth[i] >> sub & 1) << 4;
                            out[b + sub * 32 + i] = factor * (s * (float)value - m);
                        }
                    }
                }
            }
            return;
        }
        case 10:  // Q6_K: 128 bytes of low 4 bits, 64 of high 2 bits, 16 int8 scales, scale of scales; quants - 32
            for (int64_t b = 0; b < n; b += 256, p += 210) {
                const uint8_t *low = p, *high = p + 128;
                const int8_t* scales = (const int8_t*)(p + 192);
                float d = half(p + 208);
                for (int side = 0; side < 2; ++side, low += 64, high += 32, scales += 8) {
                    float* y = out + b + side * 128;
                    for (int i = 0; i < 32; ++i) {
                        const int quarter = i / 16;
                        y[i] = factor * (d * (float)scales[quarter] * (float)(((low[i] & 15) | (high[i] & 3) << 4) - 32));
                        y[i + 32] = factor * (d * (float)scales[quarter + 2] * (float)(((low[i + 32] & 15) | (high[i] >> 2 & 3) << 4) - 32));
                        y[i + 64] = factor * (d * (float)scales[quarter + 4] * (float)(((low[i] >> 4) | (high[i] >> 4 & 3) << 4) - 32));
                        y[i + 96] = factor * (d * (float)scales[quarter + 6] * (float)(((low[i + 32] >> 4) | (high[i] >> 6) << 4) - 32));
                    }
                }
            }
            return;
        default: return;
    }
}

}  // namespace
}  // namespace TW_NS
}  // namespace tw
#endif
