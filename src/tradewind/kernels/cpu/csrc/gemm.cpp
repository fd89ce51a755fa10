// The ops `linear` and `gated_linear`: how a matmul is cut up and shared; and the portable path.
//
// Knows: rows, strips, threads. Refuses to know: instruction sets (gemm_avx2.cpp, gemm_avx512.cpp), how weights were packed (pack.cpp).
#include "gemm.h"

#include <algorithm>
#include <cmath>

#include "runtime.h"

namespace tw {
namespace {

// ------------------------------------------------------------------------------------------------ portable path

void prepare_quant(const Packed& p, const float* x, uint8_t* out) {
    const int zero = 1 << (p.bits - 1);
    for (int64_t u = 0; u < p.units(); ++u, out += UNIT) {
        const int live = int(std::min<int64_t>(32, p.k - u * 32));
        uint32_t top = 0;  // absmax, as bits: not finite sorts above all others
        for (int i = 0; i < live; ++i) {
            uint32_t bits;
            std::memcpy(&bits, x + u * 32 + i, 4);
            top = std::max(top, bits & 0x7fffffff);
        }
        float absmax, scale = 0, inverse = 0;
        std::memcpy(&absmax, &top, 4);
        if (top >= 0x7f800000) scale = NAN;        // spoils this row's outputs, and only them
        else if (absmax >= 1e-30f) scale = absmax / 127.0f, inverse = 127.0f / absmax;
        int8_t q[32] = {};
        int32_t sum[2] = {};
        if (inverse != 0)
            for (int i = 0; i < live; ++i) {
                q[i] = int8_t(std::nearbyint(x[u * 32 + i] * inverse));
                sum[i / 16] += q[i];
            }
        if (p.halves == 1) sum[0] += sum[1], sum[1] = 0;
        std::memcpy(out, q, 32);
        std::memcpy(out + 32, &scale, 4);
        for (int half = 0; half < 2; ++half) {
            int32_t start = -zero * sum[half];
            float product = scale * float(sum[half]);
            if (p.symmetric) std::memcpy(out + 36 + 4 * half, &start, 4);
            else std::memcpy(out + 36 + 4 * half, &product, 4);
        }
    }
}

void prepare_fine(const Packed& p, const float* x, const uint8_t* coarse, uint8_t* out) {
    const int zero = 1 << (p.bits - 1);
    for (int64_t u = 0; u < p.units(); ++u, coarse += UNIT, out += UNIT) {
        const int live = int(std::min<int64_t>(32, p.k - u * 32));
        float step;
        std::memcpy(&step, coarse + 32, 4);
        const float scale = step / 256, inverse = step > 0 ? 256 / step : 0;
        int8_t q[32] = {};
        int32_t sum[2] = {};
        if (inverse != 0)
            for (int i = 0; i < live; ++i) {
                const float rest = x[u * 32 + i] - step * float(int8_t(coarse[i]));
                q[i] = int8_t(std::max(-127.0f, std::min(127.0f, std::nearbyint(rest * inverse))));
                sum[i / 16] += q[i];
            }
        if (p.halves == 1) sum[0] += sum[1], sum[1] = 0;
        std::memcpy(out, q, 32);
        std::memcpy(out + 32, &scale, 4);
        for (int half = 0; half < 2; ++half) {
            const int32_t start = -zero * sum[half];
            const float product = scale * float(sum[half]);
            if (p.symmetric) std::memcpy(out + 36 + 4 * half, &start, 4);
            else std::memcpy(out + 36 + 4 * half, &product, 4);
        }
    }
}

void prepare_bf16(const Packed& p, const float* x, uint8_t* out) {
    uint16_t* to = reinterpret_cast<uint16_t*>(out);
    for (int64_t k = 0; k < p.k; ++k) to[k] = float_to_bf16(x[k]);
    if (p.k % 2) to[p.k] = 0;
}

void tile_f32(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, int rows, float* acc) {
    for (int m = 0; m < rows; ++m) {
        const float* row = reinterpret_cast<const float*>(x + m * x_stride);
        for (int b = 0; b < 2; ++b) {
            const float* w = reinterpret_cast<const float*>(b ? s.w1 : s.w0);
            float sum[16] = {};
            for (int64_t k = 0; k < p.k; ++k, w += 16)
                for (int r = 0; r < 16; ++r) sum[r] += w[r] * row[k];
            std::memcpy(acc + m * STRIP + b * 16, sum, sizeof sum);
        }
    }
}

void tile_bf16(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, int rows, float* acc) {
    for (int m = 0; m < rows; ++m) {
        const uint16_t* row = reinterpret_cast<const uint16_t*>(x + m * x_stride);
        for (int b = 0; b < 2; ++b) {
            const uint16_t* w = reinterpret_cast<const uint16_t*>(b ? s.w1 : s.w0);
            float sum[16] = {};
            for (int64_t k = 0; k < p.k; k += 2, w += 32) {
                const float x0 = bf16_to_float(row[k]), x1 = bf16_to_float(row[k + 1]);
                for (int r = 0; r < 16; ++r) sum[r] += bf16_to_float(w[2 * r]) * x0;
                for (int r = 0; r < 16; ++r) sum[r] += bf16_to_float(w[2 * r + 1]) * x1;
            }
            std::memcpy(acc + m * STRIP + b * 16, sum, sizeof sum);
        }
    }
}

// The 32 quants of each of a unit's outputs, as int16 [16][32]: compilers know a sum of int16 products.
void widen(const Packed& p, const uint8_t* unit, int16_t* q) {
    for (int j = 0; j < 8; ++j) {
        for (int r = 0; r < 16; ++r) {
            uint32_t four;
            std::memcpy(&four, unit + 64 * (p.bits == 8 ? j : j & 3) + 4 * r, 4);
            if (p.bits != 8) {
                four = four >> (j & 4) & 0x0f0f0f0fu;
                for (int plane = 0; plane < p.bits - 4; ++plane) {  // four bits -> the same bit of four bytes
                    const uint32_t bits = unit[256 + 64 * plane + 8 * j + r / 2] >> (r & 1) * 4 & 15;
                    four |= (bits * 0x00204081u & 0x01010101u) << (4 + plane);
                }
            }
            for (int i = 0; i < 4; ++i) q[32 * r + 4 * j + i] = int16_t(four >> (8 * i) & 255);
        }
    }
}

template <int LENGTH>
void dots(const int16_t* q, const int16_t* x, int32_t* dot) {
    for (int r = 0; r < 16; ++r) {
        int32_t sum = 0;
        for (int i = 0; i < LENGTH; ++i) sum += q[32 * r + i] * x[i];
        dot[r] += sum;
    }
}

float scale_of(const Packed& p, const uint8_t* at, const uint8_t* shared, int64_t unit, int half, int r) {
    const int64_t index = (unit * p.halves + half) * 16 + r;
    if (p.scales == SCALES_F32) return reinterpret_cast<const float*>(at)[index];
    if (p.scales == SCALES_F16) return half_to_float(reinterpret_cast<const uint16_t*>(at)[index]);
    return half_to_float(reinterpret_cast<const uint16_t*>(shared)[unit / 8 * 16 + r]) * float(reinterpret_cast<const int8_t*>(at)[index]);
}

void tile_quant(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, int rows, float* acc) {
    std::fill(acc, acc + rows * STRIP, 0.0f);
    for (int b = 0; b < 2; ++b) {
        const uint8_t* w = b ? s.w1 : s.w0;
        for (int64_t u = 0; u < p.units(); ++u) {
            int16_t q[16 * 32];
            widen(p, w + u * p.unit_bytes(), q);
            float scale[2][16], minimum[2][16] = {};
            for (int half = 0; half < p.halves; ++half)
                for (int r = 0; r < 16; ++r) {
                    scale[half][r] = scale_of(p, w + p.scale_at, w + p.shared_scale_at(), u, half, r);
                    if (!p.symmetric) minimum[half][r] = scale_of(p, w + p.minimum_at, w + p.shared_minimum_at(), u, half, r);
                }
            for (int m = 0; m < rows; ++m) {
                const uint8_t* unit = x + m * x_stride + u * UNIT;
                int16_t xq[32];
                for (int i = 0; i < 32; ++i) xq[i] = int8_t(unit[i]);
                float sx;
                std::memcpy(&sx, unit + 32, 4);
                float* to = acc + m * STRIP + b * 16;
                for (int half = 0; half < p.halves; ++half) {
                    int32_t start = 0, dot[16];
                    float sum;
                    std::memcpy(&sum, unit + 36 + 4 * half, 4);
                    if (p.symmetric) std::memcpy(&start, unit + 36 + 4 * half, 4);
                    std::fill(dot, dot + 16, start);
                    if (p.halves == 1) dots<32>(q, xq, dot);
                    else dots<16>(q + 16 * half, xq + 16 * half, dot);
                    for (int r = 0; r < 16; ++r) to[r] += float(dot[r]) * (scale[half][r] * sx);
                    if (!p.symmetric)
                        for (int r = 0; r < 16; ++r) to[r] += minimum[half][r] * sum;
                }
            }
        }
    }
}

void finish(const float* acc, int rows, const Store& to) {
    for (int m = 0; m < rows; ++m)
        for (int b = 0; b < 2; ++b)
            for (int r = 0; r < to.columns[b]; ++r)
                to.out[m * to.stride + b * 16 + r] = acc[m * STRIP + b * 16 + r] + (to.bias[b] ? to.bias[b][r] : 0.0f);
}

void finish_gated(const float* acc, int rows, const Store& to) {
    for (int m = 0; m < rows; ++m)
        for (int r = 0; r < to.columns[0]; ++r) {
            float gate = acc[m * STRIP + r] + (to.bias[0] ? to.bias[0][r] : 0.0f);
            float up = acc[m * STRIP + 16 + r] + (to.bias[1] ? to.bias[1][r] : 0.0f);
            float inner = gate;
            if (to.activation == GELU_TANH) {  // g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3))
                inner = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
            } else if (to.activation == SWIGLU_CLAMPED) {  // the order of min and max lets a NaN through
                gate = std::min(gate, SWIGLU_LIMIT);
                up = std::max(std::min(up, SWIGLU_LIMIT), -SWIGLU_LIMIT) + 1.0f;
                inner = SWIGLU_ALPHA * gate;
            }
            to.out[m * to.stride + r] = gate / (1.0f + std::exp(-inner)) * up;
        }
}

// ------------------------------------------------------------------------------------------------ sharing the work

Path choose(const Packed& p, int isa) {
#if defined(__x86_64__)
    if (isa >= AVX512) return avx512_path(p, isa >= AVX512_BF16);
    if (isa >= AVX2) return avx2_path(p);
#endif
    (void)isa;
    return portable_path(p);
}

struct Call {
    const float* x;
    int64_t x_stride;
    const Packed* weight;
    const float* bias;
    float* out;
    int64_t out_stride, rows;
    uint8_t* scratch;
    int64_t terms;  // of a quantised activation: 1, or 2 for what the first left over
    int64_t activation;
    bool gated;
};

void matmul(const Call& c, Thread& t) {
    const Packed& p = *c.weight;
    if (c.rows <= 0) return;
    const Rows rows = rows_for(p, t.isa, c.terms, c.x_stride);

    // Rows in bands whose prepared bytes stay in the second-level cache; bands, and tiles within them, of nearly equal height, so that
    // equal shares of the items are equal work.
    const int64_t most = (c.rows + rows.tile_rows - 1) / rows.tile_rows;  // a band is at least a tile
    const int64_t bands = std::min(most, 1 + c.rows * rows.stride / BAND_BYTES), strips = (p.blocks + 1) / 2;
    const int64_t outputs = c.gated ? p.n / 2 : p.n;

    // Few rows: each thread prepares them for itself, which is cheaper than waiting for each other.
    constexpr int64_t OWN = 128 * UNIT;
    alignas(64) uint8_t own[OWN];
    const uint8_t* x = reinterpret_cast<const uint8_t*>(c.x);
    if (rows.path.prepare) {
        const bool alone = c.rows * rows.stride <= OWN;
        uint8_t* to = alone ? own : c.scratch;
        const Thread::Range range = alone ? Thread::Range{0, c.rows} : t.share(c.rows);
        for (int64_t m = range.begin; m < range.end; ++m) prepare_row(rows, p, c.x + m * c.x_stride, to + m * rows.stride);
        if (!alone) t.barrier();
        x = to;
    }

    share_items(t, bands * strips, [&](int64_t item, int64_t next) {
        const int64_t strip = item % strips, band = item / strips;
        const int64_t begin = c.rows * band / bands, end = c.rows * (band + 1) / bands;
        Strip w = strip_of(p, strip, next < 0 ? -1 : next % strips);
        const int64_t column = strip * (c.gated ? 16 : STRIP);
        Store to{c.out + begin * c.out_stride + column, c.out_stride, {nullptr, nullptr}, {0, 0}, c.activation};
        const int64_t left = outputs - column;
        to.columns[0] = int(std::min<int64_t>(16, left));
        to.columns[1] = int(c.gated ? to.columns[0] : std::max<int64_t>(0, std::min<int64_t>(16, left - 16)));
        if (c.bias) {
            to.bias[0] = c.bias + column;
            to.bias[1] = c.bias + (c.gated ? outputs + column : column + 16);
        }
        const int64_t tiles = (end - begin + rows.tile_rows - 1) / rows.tile_rows;
        alignas(64) float acc[MAX_ROWS * STRIP];
        for (int64_t i = 0; i < tiles; ++i) {
            const int64_t first = begin + (end - begin) * i / tiles, last = begin + (end - begin) * (i + 1) / tiles;
            strip_sums(rows, p, w, x + first * rows.stride, int(last - first), acc);
            w.next = nullptr;
            (c.gated ? rows.path.finish_gated : rows.path.finish)(acc, int(last - first), to);
            to.out += (last - first) * c.out_stride;
        }
    });
}

}  // namespace

int64_t prepared_stride(const Packed& p) {
    if (p.layout == LAYOUT_QUANT) return p.units() * UNIT;
    return p.layout == LAYOUT_BF16 ? (p.k + 1) / 2 * 4 : 0;
}

Rows rows_for(const Packed& p, int isa, int64_t terms, int64_t x_stride) {
    Rows rows{choose(p, isa), p.layout == LAYOUT_QUANT ? terms : 1, 0, 0, 0, false};
    rows.folded = rows.terms == 2 && !rows.path.tile_two;
    rows.tile_rows = rows.folded ? rows.path.max_rows / 2 : rows.path.max_rows;
    rows.term = rows.path.prepare ? prepared_stride(p) : x_stride * int64_t(sizeof(float));
    rows.stride = rows.term * rows.terms;
    return rows;
}

void prepare_row(const Rows& rows, const Packed& p, const float* x, uint8_t* out) {
    rows.path.prepare(p, x, out);
    if (rows.terms == 2) rows.path.prepare_fine(p, x, out, out + rows.term);
}

void strip_sums(const Rows& rows, const Packed& p, const Strip& w, const uint8_t* x, int count, float* acc) {
    if (!rows.folded) {
        (rows.terms == 2 ? rows.path.tile_two : rows.path.tile)(p, w, x, rows.stride, count, acc);
        return;
    }
    rows.path.tile(p, w, x, rows.term, count * 2, acc);
    for (int m = 0; m < count; ++m)
        for (int i = 0; i < STRIP; ++i) acc[m * STRIP + i] = acc[2 * m * STRIP + i] + acc[(2 * m + 1) * STRIP + i];
}

Path portable_path(const Packed& p) {
    Path path{8, tile_f32, nullptr, finish, finish_gated, prepare_fine, nullptr};
    if (p.layout == LAYOUT_BF16) path.tile = tile_bf16, path.prepare = prepare_bf16;
    if (p.layout == LAYOUT_QUANT) path.tile = tile_quant, path.prepare = prepare_quant;
    return path;
}

// x, x stride (floats), packed matrix, bias or null, out, out stride (floats), count, scratch, terms
TW_OP(linear, 9) {
    matmul({ptr<float>(a[0]), a[1].i, ptr<Packed>(a[2]), ptr<float>(a[3]), ptr<float>(a[4]), a[5].i, live(a[6]), ptr<uint8_t>(a[7]), a[8].i, 0, false}, t);
}

// The same and the activation (gemm.h); bias is gate then up.
TW_OP(gated_linear, 10) {
    matmul({ptr<float>(a[0]), a[1].i, ptr<Packed>(a[2]), ptr<float>(a[3]), ptr<float>(a[4]), a[5].i, live(a[6]), ptr<uint8_t>(a[7]), a[8].i, a[9].i, true}, t);
}

}  // namespace tw

extern "C" {

// Bytes of scratch that `linear` needs for `rows` rows of this matrix, each in `terms` terms.
int64_t tw_matmul_scratch(const void* packed, int64_t rows, int64_t terms) {
    return rows * terms * tw::prepared_stride(*static_cast<const tw::Packed*>(packed));
}
}
