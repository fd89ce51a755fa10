// The AVX2 paths of the matmuls, for machines without VNNI.
//
// Knows: registers. Refuses to know: how work is shared (gemm.cpp), how weights were packed (pack.cpp).
//
// maddubs adds two products u8 * s8 in 16 bits and saturates, so the sums are cut by what the quants can reach (activations are within
// +-127):   4 bits: 8 * 3810 fit;   5 bits: 4 * 7874;   6 bits: 2 * 16002;   8 bits: the low seven bits one by one (32258), the top
// bit apart. The integer dots are exact, as everywhere.
#include "gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

TW_TARGET("avx2,fma,f16c")

namespace tw {
namespace {

inline __attribute__((always_inline)) __m256i load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

inline __attribute__((always_inline)) __m256i broadcast(const uint8_t* at) {
    int32_t value;
    std::memcpy(&value, at, 4);
    return _mm256_set1_epi32(value);
}

inline __attribute__((always_inline)) __m256 broadcast_ps(const uint8_t* at) { return _mm256_castsi256_ps(broadcast(at)); }

// 32 bits -> 32 bytes, each `value` where its bit is set.
inline __attribute__((always_inline)) __m256i spread(const uint8_t* at, char value) {
    const __m256i byte_of = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit_of = _mm256_set1_epi64x(int64_t(0x8040201008040201u));
    const __m256i bits = _mm256_and_si256(_mm256_shuffle_epi8(broadcast(at), byte_of), bit_of);
    return _mm256_and_si256(_mm256_cmpeq_epi8(bits, bit_of), _mm256_set1_epi8(value));
}

// Vector k4 = j, 0 <= j < 8, of outputs 8 part .. 8 part + 7.
template <int BITS>
inline __attribute__((always_inline)) __m256i quants(const uint8_t* unit, int j, int part) {
    if (BITS == 8) return load(unit + 64 * j + 32 * part);
    __m256i q = load(unit + 64 * (j & 3) + 32 * part);
    if (j >= 4) q = _mm256_srli_epi16(q, 4);
    q = _mm256_and_si256(q, _mm256_set1_epi8(15));
    if (BITS >= 5) q = _mm256_or_si256(q, spread(unit + 256 + 8 * j + 4 * part, 16));
    if (BITS == 6) q = _mm256_or_si256(q, spread(unit + 320 + 8 * j + 4 * part, 32));
    return q;
}

// Scales number `index` (unit * HALVES + half) of a region; `shared` is the region of shared factors, if there is one.
template <Scales KIND, int HALVES>
inline __attribute__((always_inline)) __m256 scales(const uint8_t* at, const uint8_t* shared, int64_t index, int part) {
    if (KIND == SCALES_F32) return _mm256_loadu_ps(reinterpret_cast<const float*>(at) + index * 16 + 8 * part);
    if (KIND == SCALES_F16) return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at + index * 32 + 16 * part)));
    const __m256 steps = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(at + index * 16 + 8 * part))));
    return _mm256_mul_ps(steps, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(shared + index / (8 * HALVES) * 32 + 16 * part))));
}

// Outputs 8 part .. 8 part + 7 of a block: more would not fit in the registers.
template <int BITS, int HALVES, Scales KIND, bool SYMMETRIC, int ROWS>
void part_quant(const Packed& p, const uint8_t* w, int part, const uint8_t* x, int64_t x_stride, float* acc) {
    constexpr int RUN = BITS == 4 ? 8 : BITS == 5 ? 4 : BITS == 6 ? 2 : 1;  // products that fit in 16 bits
    const __m256i ones = _mm256_set1_epi16(1);
    const uint8_t *unit = w, *s = w + p.scale_at, *d = w + p.shared_scale_at(), *n = w + p.minimum_at, *e = w + p.shared_minimum_at();
    const int64_t units = p.units();
    __m256 sum[ROWS];
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; ++m) sum[m] = _mm256_setzero_ps();
    for (int64_t u = 0; u < units; ++u, x += UNIT, unit += 64 * BITS) {
#pragma GCC unroll 2
        for (int half = 0; half < HALVES; ++half) {
            __m256i dot[ROWS], narrow[ROWS];  // 8 bits: narrow holds the sums of the top bit
#pragma GCC unroll 4
            for (int m = 0; m < ROWS; ++m) {
                dot[m] = SYMMETRIC ? broadcast(x + m * x_stride + 36 + 4 * half) : _mm256_setzero_si256();
                narrow[m] = _mm256_setzero_si256();
            }
#pragma GCC unroll 8
            for (int i = 0; i < 8 / HALVES; ++i) {
                const int j = half * 4 + i;
                __m256i q = quants<BITS>(unit, j, part), high = q;
                if (BITS == 8) {
                    high = _mm256_and_si256(_mm256_srli_epi16(q, 7), _mm256_set1_epi8(1));
                    q = _mm256_and_si256(q, _mm256_set1_epi8(127));
                }
#pragma GCC unroll 4
                for (int m = 0; m < ROWS; ++m) {
                    const __m256i four = broadcast(x + m * x_stride + 4 * j);
                    const __m256i product = _mm256_maddubs_epi16(q, four);
                    if (BITS == 8) {
                        narrow[m] = _mm256_add_epi16(narrow[m], _mm256_maddubs_epi16(high, four));
                        dot[m] = _mm256_add_epi32(dot[m], _mm256_madd_epi16(product, ones));
                    } else {
                        narrow[m] = i % RUN ? _mm256_add_epi16(narrow[m], product) : product;
                        if (i % RUN == RUN - 1 || i == 8 / HALVES - 1)
                            dot[m] = _mm256_add_epi32(dot[m], _mm256_madd_epi16(narrow[m], ones));
                    }
                }
            }
            const __m256 scale = scales<KIND, HALVES>(s, d, u * HALVES + half, part);
#pragma GCC unroll 4
            for (int m = 0; m < ROWS; ++m) {
                if (BITS == 8) dot[m] = _mm256_add_epi32(dot[m], _mm256_madd_epi16(narrow[m], _mm256_set1_epi16(128)));
                const __m256 both = _mm256_mul_ps(scale, broadcast_ps(x + m * x_stride + 32));
                sum[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(dot[m]), both, sum[m]);
            }
            if (!SYMMETRIC) {
                const __m256 minimum = scales<KIND, HALVES>(n, e, u * HALVES + half, part);
#pragma GCC unroll 4
                for (int m = 0; m < ROWS; ++m) sum[m] = _mm256_fmadd_ps(minimum, broadcast_ps(x + m * x_stride + 36 + 4 * half), sum[m]);
            }
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; ++m) _mm256_storeu_ps(acc + m * STRIP, sum[m]);
}

template <int BITS, int HALVES, Scales KIND, bool SYMMETRIC>
void tile_quant(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, int rows, float* acc) {
    for (int b = 0; b < 2; ++b)
        for (int part = 0; part < 2; ++part) {
            const uint8_t* w = b ? s.w1 : s.w0;
            float* to = acc + 16 * b + 8 * part;
            switch (rows) {
                case 1: part_quant<BITS, HALVES, KIND, SYMMETRIC, 1>(p, w, part, x, x_stride, to); break;
                case 2: part_quant<BITS, HALVES, KIND, SYMMETRIC, 2>(p, w, part, x, x_stride, to); break;
                case 3: part_quant<BITS, HALVES, KIND, SYMMETRIC, 3>(p, w, part, x, x_stride, to); break;
                default: part_quant<BITS, HALVES, KIND, SYMMETRIC, 4>(p, w, part, x, x_stride, to);
            }
        }
}

// The combinations that packing makes: steps are of Q4_K, Q5_K and Q6_K.
template <int BITS>
Tile choose_quant(const Packed& p) {
    if constexpr (BITS == 4 || BITS == 5)
        if (p.scales == SCALES_STEPS) return tile_quant<BITS, 1, SCALES_STEPS, false>;
    if constexpr (BITS == 6)
        if (p.scales == SCALES_STEPS) return tile_quant<BITS, 2, SCALES_STEPS, true>;
    if (p.halves == 2) return p.symmetric ? tile_quant<BITS, 2, SCALES_F32, true> : tile_quant<BITS, 2, SCALES_F32, false>;
    if (p.scales == SCALES_F32) return p.symmetric ? tile_quant<BITS, 1, SCALES_F32, true> : tile_quant<BITS, 1, SCALES_F32, false>;
    return p.symmetric ? tile_quant<BITS, 1, SCALES_F16, true> : tile_quant<BITS, 1, SCALES_F16, false>;
}

template <int ROWS>
void strip_f32(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, float* acc) {
    __m256 sum[4][ROWS];
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) sum[i][m] = _mm256_setzero_ps();
    for (int64_t k = 0; k < p.k; ++k) {
        __m256 one[ROWS];
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; ++m) one[m] = broadcast_ps(x + m * x_stride + k * 4);
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m256 w = _mm256_loadu_ps(reinterpret_cast<const float*>((i < 2 ? s.w0 : s.w1) + k * 64 + i % 2 * 32));
#pragma GCC unroll 4
            for (int m = 0; m < ROWS; ++m) sum[i][m] = _mm256_fmadd_ps(w, one[m], sum[i][m]);
        }
    }
#pragma GCC unroll 4
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) _mm256_storeu_ps(acc + m * STRIP + i * 8, sum[i][m]);
}

// bfloat16 as two float32 products, the even k first.
template <int ROWS>
void strip_bf16(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, float* acc) {
    const __m256i high = _mm256_set1_epi32(int(0xffff0000u));
    for (int b = 0; b < 2; ++b) {
        const uint8_t* from = b ? s.w1 : s.w0;
        __m256 sum[2][ROWS];
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; ++m) sum[0][m] = sum[1][m] = _mm256_setzero_ps();
        for (int64_t k = 0; k < (p.k + 1) / 2; ++k) {
            const __m256i w0 = load(from + k * 64), w1 = load(from + k * 64 + 32);
#pragma GCC unroll 4
            for (int m = 0; m < ROWS; ++m) {
                const __m256i two = broadcast(x + m * x_stride + k * 4);
                const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(two, 16)), odd = _mm256_castsi256_ps(_mm256_and_si256(two, high));
                sum[0][m] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w0, 16)), even, sum[0][m]);
                sum[1][m] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_slli_epi32(w1, 16)), even, sum[1][m]);
                sum[0][m] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w0, high)), odd, sum[0][m]);
                sum[1][m] = _mm256_fmadd_ps(_mm256_castsi256_ps(_mm256_and_si256(w1, high)), odd, sum[1][m]);
            }
        }
#pragma GCC unroll 4
        for (int m = 0; m < ROWS; ++m) {
            _mm256_storeu_ps(acc + m * STRIP + b * 16, sum[0][m]);
            _mm256_storeu_ps(acc + m * STRIP + b * 16 + 8, sum[1][m]);
        }
    }
}

void tile_f32(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, int rows, float* acc) {
    if (rows == 1) strip_f32<1>(p, s, x, x_stride, acc);
    else if (rows == 2) strip_f32<2>(p, s, x, x_stride, acc);
    else strip_f32<3>(p, s, x, x_stride, acc);
}

void tile_bf16(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, int rows, float* acc) {
    if (rows == 1) strip_bf16<1>(p, s, x, x_stride, acc);
    else if (rows == 2) strip_bf16<2>(p, s, x, x_stride, acc);
    else strip_bf16<3>(p, s, x, x_stride, acc);
}

inline int32_t total(__m256i v) {
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1)));
}

void prepare_quant(const Packed& p, const float* x, uint8_t* out) {
    const int zero = 1 << (p.bits - 1);
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    for (int64_t k = 0; k < p.k; k += 32, out += UNIT) {
        float padded[32] = {};
        const float* from = x + k;
        if (p.k - k < 32) {
            std::memcpy(padded, from, size_t(p.k - k) * 4);
            from = padded;
        }
        __m256 v[4];
        __m256i most = _mm256_setzero_si256();
        for (int i = 0; i < 4; ++i) {
            v[i] = _mm256_loadu_ps(from + 8 * i);
            most = _mm256_max_epu32(most, _mm256_and_si256(_mm256_castps_si256(v[i]), magnitude));
        }
        __m128i m = _mm_max_epu32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0x4e));
        m = _mm_max_epu32(m, _mm_shuffle_epi32(m, 0xb1));
        const uint32_t top = uint32_t(_mm_cvtsi128_si32(m));  // absmax as bits: what is not finite sorts above everything else
        float absmax, scale = 0, inverse = 0;
        std::memcpy(&absmax, &top, 4);
        const bool bad = top >= 0x7f800000;
        if (bad) scale = NAN;  // spoils this row's outputs, and only them
        else if (absmax >= 1e-30f) scale = absmax / 127.0f, inverse = 127.0f / absmax;
        __m256i q[4];
        for (int i = 0; i < 4; ++i)
            q[i] = bad ? _mm256_setzero_si256() : _mm256_cvtps_epi32(_mm256_mul_ps(v[i], _mm256_set1_ps(inverse)));
        int32_t totals[2] = {total(_mm256_add_epi32(q[0], q[1])), total(_mm256_add_epi32(q[2], q[3]))};
        if (p.halves == 1) totals[0] += totals[1], totals[1] = 0;
        // The packs work within 128-bit lanes: the permutation puts the words in order again.
        const __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
        const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permutevar8x32_epi32(bytes, order));
        std::memcpy(out + 32, &scale, 4);
        for (int half = 0; half < 2; ++half) {
            const int32_t start = -zero * totals[half];
            const float product = scale * float(totals[half]);
            if (p.symmetric) std::memcpy(out + 36 + 4 * half, &start, 4);
            else std::memcpy(out + 36 + 4 * half, &product, 4);
        }
    }
}

// As in gemm_avx512.cpp; 2^n is put together from two factors so that denormal results come out.
inline __m256 exp_ps(__m256 x) {
    x = _mm256_max_ps(_mm256_set1_ps(-104.0f), _mm256_min_ps(_mm256_set1_ps(88.7f), x));
    const __m256 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    __m256 y = _mm256_set1_ps(1.0f / 5040);
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 720));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 120));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 24));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f / 6));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(0.5f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f));
    y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(1.0f));
    const __m256i whole = _mm256_cvtps_epi32(n), one = _mm256_srai_epi32(whole, 1), two = _mm256_sub_epi32(whole, one);
    const __m256i bias = _mm256_set1_epi32(127);
    y = _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(one, bias), 23)));
    return _mm256_mul_ps(y, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(two, bias), 23)));
}

void finish(const float* acc, int rows, const Store& to) {
    for (int b = 0; b < 2; ++b) {
        float bias[16] = {};
        if (to.bias[b]) std::memcpy(bias, to.bias[b], size_t(to.columns[b]) * 4);
        for (int m = 0; m < rows; ++m) {
            float* out = to.out + m * to.stride + b * 16;
            const float* from = acc + m * STRIP + b * 16;
            if (to.columns[b] == 16) {
                _mm256_storeu_ps(out, _mm256_add_ps(_mm256_loadu_ps(from), _mm256_loadu_ps(bias)));
                _mm256_storeu_ps(out + 8, _mm256_add_ps(_mm256_loadu_ps(from + 8), _mm256_loadu_ps(bias + 8)));
            } else {
                for (int r = 0; r < to.columns[b]; ++r) out[r] = from[r] + bias[r];
            }
        }
    }
}

void finish_gated(const float* acc, int rows, const Store& to) {
    float bias[2][16] = {};
    for (int b = 0; b < 2; ++b)
        if (to.bias[b]) std::memcpy(bias[b], to.bias[b], size_t(to.columns[b]) * 4);
    for (int m = 0; m < rows; ++m) {
        float result[16];
        for (int i = 0; i < 16; i += 8) {
            __m256 gate = _mm256_add_ps(_mm256_loadu_ps(acc + m * STRIP + i), _mm256_loadu_ps(bias[0] + i));
            __m256 up = _mm256_add_ps(_mm256_loadu_ps(acc + m * STRIP + 16 + i), _mm256_loadu_ps(bias[1] + i));
            __m256 inner = gate;
            if (to.activation == GELU_TANH) {
                const __m256 cube = _mm256_mul_ps(_mm256_mul_ps(gate, gate), gate);
                inner = _mm256_mul_ps(_mm256_set1_ps(1.5957691216057308f), _mm256_fmadd_ps(_mm256_set1_ps(0.044715f), cube, gate));
            } else if (to.activation == SWIGLU_CLAMPED) {  // min and max give their second operand where one is NaN
                const __m256 limit = _mm256_set1_ps(SWIGLU_LIMIT);
                gate = _mm256_min_ps(limit, gate);
                up = _mm256_max_ps(_mm256_set1_ps(-SWIGLU_LIMIT), _mm256_min_ps(limit, up));
                up = _mm256_add_ps(up, _mm256_set1_ps(1.0f));
                inner = _mm256_mul_ps(_mm256_set1_ps(SWIGLU_ALPHA), gate);
            }
            const __m256 e = exp_ps(_mm256_sub_ps(_mm256_setzero_ps(), inner));
            const __m256 active = _mm256_div_ps(gate, _mm256_add_ps(_mm256_set1_ps(1.0f), e));
            _mm256_storeu_ps(result + i, _mm256_mul_ps(active, up));
        }
        std::memcpy(to.out + m * to.stride, result, size_t(to.columns[0]) * 4);
    }
}

}  // namespace
}  // namespace tw
TW_TARGET_END

namespace tw {

Path avx2_path(const Packed& p) {
    Path path = portable_path(p);
    path.max_rows = 3;
    path.finish = finish;
    path.finish_gated = finish_gated;
    if (p.layout == LAYOUT_F32) path.tile = tile_f32;
    else if (p.layout == LAYOUT_BF16) path.tile = tile_bf16;
    else {
        path.max_rows = 4;
        path.prepare = prepare_quant;
        path.tile = p.bits == 4 ? choose_quant<4>(p) : p.bits == 5 ? choose_quant<5>(p) : p.bits == 6 ? choose_quant<6>(p) : choose_quant<8>(p);
    }
    return path;
}

}  // namespace tw
#endif
