// The AVX-512 paths of the matmuls: VNNI for quants, BF16 where the machine has it.
//
// Knows: registers. Refuses to know: how work is shared (gemm.cpp), how weights were packed (pack.cpp).
//
// The quant tile per unit of 32 k:   dot (int32, exact) = start + sum of dpbusd(weights u8, 4 activation bytes broadcast)
//                                    acc = fma(dot, scale * sx, acc);  unless symmetric: acc = fma(minimum, sx * sum(q), acc)
// Nibbles and bit planes are unpacked in registers by the vector pipes that dpbusd leaves free, once per tile.
#include "gemm.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include <cmath>

TW_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,fma,f16c,avx2")

namespace tw {
namespace {

template <int ROWS>
inline __attribute__((always_inline)) void store_tile(const __m512 (&sum)[2][ROWS], float* acc) {
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 2
        for (int b = 0; b < 2; ++b) _mm512_store_ps(acc + m * STRIP + b * 16, sum[b][m]);
}

inline __attribute__((always_inline)) __m512i broadcast(const uint8_t* at) {
    int32_t value;
    std::memcpy(&value, at, 4);
    return _mm512_set1_epi32(value);
}

inline __attribute__((always_inline)) __m512 broadcast_ps(const uint8_t* at) { return _mm512_castsi512_ps(broadcast(at)); }

// Sets the planes' bits (16, 32) of the vector k4 = j.
template <int BITS>
inline __attribute__((always_inline)) __m512i add_planes(__m512i q, const uint8_t* unit, int j) {
    if (BITS == 5 || BITS == 6) {
        uint64_t mask;
        std::memcpy(&mask, unit + 256 + 8 * j, 8);
        q = _mm512_mask_add_epi8(q, mask, q, _mm512_set1_epi8(16));
    }
    if (BITS == 6) {
        uint64_t mask;
        std::memcpy(&mask, unit + 320 + 8 * j, 8);
        q = _mm512_mask_add_epi8(q, mask, q, _mm512_set1_epi8(32));
    }
    return q;
}

// Vector k4 = j of a unit, 0 <= j < 8.
template <int BITS>
inline __attribute__((always_inline)) __m512i quants(const uint8_t* unit, int j) {
    if (BITS == 8) return _mm512_load_si512(unit + 64 * j);
    __m512i both = _mm512_load_si512(unit + 64 * (j & 3));
    if (j >= 4) both = _mm512_srli_epi16(both, 4);
    return add_planes<BITS>(_mm512_and_si512(both, _mm512_set1_epi8(15)), unit, j);
}

// Scales number `index` (unit * HALVES + half) of a region; `shared` is the region of shared factors, if there is one.
template <Scales KIND, int HALVES>
inline __attribute__((always_inline)) __m512 scales(const uint8_t* at, const uint8_t* shared, int64_t index) {
    if (KIND == SCALES_F32) return _mm512_load_ps(at + index * 64);
    if (KIND == SCALES_F16) return _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(at + index * 32)));
    const __m512 steps = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(reinterpret_cast<const __m128i*>(at + index * 16))));
    return _mm512_mul_ps(steps, _mm512_cvtph_ps(_mm256_load_si256(reinterpret_cast<const __m256i*>(shared + index / (8 * HALVES) * 32))));
}

// TERMS 2: the second term of a row lies x_stride / 2 behind the first, in steps 256 times finer.
template <int BITS, int HALVES, Scales KIND, bool SYMMETRIC, int TERMS, int ROWS>
void tile_quant(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, float* acc) {
    __m512 sum[2][ROWS];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) sum[0][m] = sum[1][m] = _mm512_setzero_ps();
    const int64_t units = p.units(), fine = x_stride / 2;
    const uint8_t *s0 = s.w0 + p.scale_at, *s1 = s.w1 + p.scale_at, *m0 = s.w0 + p.minimum_at, *m1 = s.w1 + p.minimum_at;
    const uint8_t *d0 = s.w0 + p.shared_scale_at(), *d1 = s.w1 + p.shared_scale_at();
    const uint8_t *e0 = s.w0 + p.shared_minimum_at(), *e1 = s.w1 + p.shared_minimum_at();
    const uint8_t *q0 = s.w0, *q1 = s.w1, *next = s.next;
    constexpr int LINES = 2 * BITS + HALVES * (KIND == SCALES_F32 ? 2 : 1) * (SYMMETRIC || KIND == SCALES_STEPS ? 1 : 2);  // of a strip's unit
    for (int64_t u = 0; u < units; ++u) {
        if (next) {  // a strip is one stretch of memory, and a strip's time is longer than the way to memory
#pragma GCC unroll 32
            for (int i = 0; i < LINES; ++i) _mm_prefetch(next + 64 * i, _MM_HINT_T0);
            next += 64 * LINES;
        }
#pragma GCC unroll 2
        for (int half = 0; half < HALVES; ++half) {
            __m512i dot[2][ROWS];
#pragma GCC unroll 16
            for (int m = 0; m < ROWS; ++m) dot[0][m] = dot[1][m] = SYMMETRIC ? broadcast(x + m * x_stride + 36 + 4 * half) : _mm512_setzero_si512();
#pragma GCC unroll 2
            for (int term = 0; term < TERMS; ++term) {
                const uint8_t* xt = x + term * fine;
                if (term == 1) {
#pragma GCC unroll 16
                    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 2
                        for (int b = 0; b < 2; ++b) {
                            dot[b][m] = _mm512_slli_epi32(dot[b][m], 8);
                            if (SYMMETRIC) dot[b][m] = _mm512_add_epi32(dot[b][m], broadcast(xt + m * x_stride + 36 + 4 * half));
                        }
                }
#pragma GCC unroll 8
                for (int i = 0; i < 8 / HALVES; ++i) {
                    // k4 in the order 0 4 1 5 ..., so that a byte of two nibbles is loaded once.
                    const int j = HALVES == 2 ? half * 4 + i : i / 2 + i % 2 * 4;
                    const __m512i a = quants<BITS>(q0, j), b = quants<BITS>(q1, j);
#pragma GCC unroll 16
                    for (int m = 0; m < ROWS; ++m) {
                        const __m512i four = broadcast(xt + m * x_stride + 4 * j);
                        dot[0][m] = _mm512_dpbusd_epi32(dot[0][m], a, four);
                        dot[1][m] = _mm512_dpbusd_epi32(dot[1][m], b, four);
                    }
                }
            }
            const int64_t index = u * HALVES + half;
            const __m512 a = scales<KIND, HALVES>(s0, d0, index), b = scales<KIND, HALVES>(s1, d1, index);
#pragma GCC unroll 16
            for (int m = 0; m < ROWS; ++m) {
                const __m512 sx = broadcast_ps(x + (TERMS - 1) * fine + m * x_stride + 32);
                sum[0][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[0][m]), _mm512_mul_ps(a, sx), sum[0][m]);
                sum[1][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[1][m]), _mm512_mul_ps(b, sx), sum[1][m]);
            }
            if (!SYMMETRIC) {
                const __m512 c = scales<KIND, HALVES>(m0, e0, index), d = scales<KIND, HALVES>(m1, e1, index);
#pragma GCC unroll 16
                for (int m = 0; m < ROWS; ++m) {
                    __m512 total = broadcast_ps(x + m * x_stride + 36 + 4 * half);
                    if (TERMS == 2) total = _mm512_add_ps(total, broadcast_ps(x + fine + m * x_stride + 36 + 4 * half));
                    sum[0][m] = _mm512_fmadd_ps(c, total, sum[0][m]);
                    sum[1][m] = _mm512_fmadd_ps(d, total, sum[1][m]);
                }
            }
        }
        x += UNIT;
        q0 += 64 * BITS;
        q1 += 64 * BITS;
    }
    store_tile(sum, acc);
}

template <int BITS, int HALVES, Scales KIND, bool SYMMETRIC, int TERMS>
void tiles_quant(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, int rows, float* acc) {
    switch (rows) {
        case 1: return tile_quant<BITS, HALVES, KIND, SYMMETRIC, TERMS, 1>(p, s, x, x_stride, acc);
        case 2: return tile_quant<BITS, HALVES, KIND, SYMMETRIC, TERMS, 2>(p, s, x, x_stride, acc);
        case 3: return tile_quant<BITS, HALVES, KIND, SYMMETRIC, TERMS, 3>(p, s, x, x_stride, acc);
        case 4: return tile_quant<BITS, HALVES, KIND, SYMMETRIC, TERMS, 4>(p, s, x, x_stride, acc);
        case 5: return tile_quant<BITS, HALVES, KIND, SYMMETRIC, TERMS, 5>(p, s, x, x_stride, acc);
        default: return tile_quant<BITS, HALVES, KIND, SYMMETRIC, TERMS, 6>(p, s, x, x_stride, acc);
    }
}

// The combinations that packing makes: steps are of Q4_K, Q5_K and Q6_K.
template <int BITS, int TERMS>
Tile choose_quant(const Packed& p) {
    if constexpr (BITS == 4 || BITS == 5)
        if (p.scales == SCALES_STEPS) return tiles_quant<BITS, 1, SCALES_STEPS, false, TERMS>;
    if constexpr (BITS == 6)
        if (p.scales == SCALES_STEPS) return tiles_quant<BITS, 2, SCALES_STEPS, true, TERMS>;
    if (p.halves == 2) return p.symmetric ? tiles_quant<BITS, 2, SCALES_F32, true, TERMS> : tiles_quant<BITS, 2, SCALES_F32, false, TERMS>;
    if (p.scales == SCALES_F32) return p.symmetric ? tiles_quant<BITS, 1, SCALES_F32, true, TERMS> : tiles_quant<BITS, 1, SCALES_F32, false, TERMS>;
    return p.symmetric ? tiles_quant<BITS, 1, SCALES_F16, true, TERMS> : tiles_quant<BITS, 1, SCALES_F16, false, TERMS>;
}

template <int TERMS>
Tile choose_bits(const Packed& p) {
    if (p.bits == 4) return choose_quant<4, TERMS>(p);
    if (p.bits == 5) return choose_quant<5, TERMS>(p);
    return p.bits == 6 ? choose_quant<6, TERMS>(p) : choose_quant<8, TERMS>(p);
}

// ------------------------------------------------------------------------------------------------ float layouts

template <int ROWS>
void tile_f32(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, float* acc) {
    __m512 sum[2][ROWS];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) sum[0][m] = sum[1][m] = _mm512_setzero_ps();
    for (int64_t k = 0; k < p.k; ++k) {
        const __m512 a = _mm512_load_ps(s.w0 + k * 64), b = _mm512_load_ps(s.w1 + k * 64);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m) {
            const __m512 one = broadcast_ps(x + m * x_stride + k * 4);
            sum[0][m] = _mm512_fmadd_ps(a, one, sum[0][m]);
            sum[1][m] = _mm512_fmadd_ps(b, one, sum[1][m]);
        }
    }
    store_tile(sum, acc);
}

// bfloat16 without its instructions: two float32 products, the even k first.
template <int ROWS>
void tile_bf16_wide(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, float* acc) {
    __m512 sum[2][ROWS];
    const __m512i high = _mm512_set1_epi32(int(0xffff0000u));
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) sum[0][m] = sum[1][m] = _mm512_setzero_ps();
    for (int64_t k = 0; k < (p.k + 1) / 2; ++k) {
        const __m512i a = _mm512_load_si512(s.w0 + k * 64), b = _mm512_load_si512(s.w1 + k * 64);
        const __m512 a0 = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)), a1 = _mm512_castsi512_ps(_mm512_and_si512(a, high));
        const __m512 b0 = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16)), b1 = _mm512_castsi512_ps(_mm512_and_si512(b, high));
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m) {
            const __m512i two = broadcast(x + m * x_stride + k * 4);
            const __m512 x0 = _mm512_castsi512_ps(_mm512_slli_epi32(two, 16)), x1 = _mm512_castsi512_ps(_mm512_and_si512(two, high));
            sum[0][m] = _mm512_fmadd_ps(a1, x1, _mm512_fmadd_ps(a0, x0, sum[0][m]));
            sum[1][m] = _mm512_fmadd_ps(b1, x1, _mm512_fmadd_ps(b0, x0, sum[1][m]));
        }
    }
    store_tile(sum, acc);
}

#define TW_ROWS(NAME)                                                                                                            \
    void NAME##_rows(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, int rows, float* acc) { \
        switch (rows) {                                                                                                          \
            case 1: return NAME<1>(p, s, x, x_stride, acc);                                                                 \
            case 2: return NAME<2>(p, s, x, x_stride, acc);                                                                 \
            case 3: return NAME<3>(p, s, x, x_stride, acc);                                                                 \
            case 4: return NAME<4>(p, s, x, x_stride, acc);                                                                 \
            case 5: return NAME<5>(p, s, x, x_stride, acc);                                                                 \
            case 6: return NAME<6>(p, s, x, x_stride, acc);                                                                 \
            case 7: return NAME<7>(p, s, x, x_stride, acc);                                                                 \
            case 8: return NAME<8>(p, s, x, x_stride, acc);                                                                 \
            case 9: return NAME<9>(p, s, x, x_stride, acc);                                                                 \
            case 10: return NAME<10>(p, s, x, x_stride, acc);                                                               \
            case 11: return NAME<11>(p, s, x, x_stride, acc);                                                               \
            default: return NAME<12>(p, s, x, x_stride, acc);                                                               \
        }                                                                                                                        \
    }
TW_ROWS(tile_f32)
TW_ROWS(tile_bf16_wide)

// ------------------------------------------------------------------------------------------------ activations

// What stands behind the 32 quants of a prepared unit.
inline void store_unit_facts(const Packed& p, int zero, __m512i qlo, __m512i qhi, float scale, uint8_t* out) {
    std::memcpy(out + 32, &scale, 4);
    int32_t total[2] = {0, 0};
    if (p.halves == 1) {
        total[0] = _mm512_reduce_add_epi32(_mm512_add_epi32(qlo, qhi));
    } else {
        total[0] = _mm512_reduce_add_epi32(qlo);
        total[1] = _mm512_reduce_add_epi32(qhi);
    }
    for (int half = 0; half < 2; ++half) {
        const int32_t start = -zero * total[half];
        const float product = scale * float(total[half]);
        if (p.symmetric) std::memcpy(out + 36 + 4 * half, &start, 4);
        else std::memcpy(out + 36 + 4 * half, &product, 4);
    }
}

void prepare_quant(const Packed& p, const float* x, uint8_t* out) {
    const int zero = 1 << (p.bits - 1);
    for (int64_t k = 0; k < p.k; k += 32, out += UNIT) {
        const int64_t live = p.k - k;
        __m512 lo, hi;
        if (live >= 32) {
            lo = _mm512_loadu_ps(x + k);
            hi = _mm512_loadu_ps(x + k + 16);
        } else {
            lo = _mm512_maskz_loadu_ps(__mmask16(live >= 16 ? 0xffff : (1 << live) - 1), x + k);
            hi = _mm512_maskz_loadu_ps(__mmask16(live > 16 ? (1 << (live - 16)) - 1 : 0), x + k + 16);
        }
        // absmax as bits: what is not finite sorts above everything else.
        const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
        const __m512i both = _mm512_max_epu32(_mm512_and_si512(_mm512_castps_si512(lo), magnitude), _mm512_and_si512(_mm512_castps_si512(hi), magnitude));
        const uint32_t top = _mm512_reduce_max_epu32(both);
        float absmax, scale = 0, inverse = 0;
        std::memcpy(&absmax, &top, 4);
        if (top >= 0x7f800000) {
            scale = NAN;  // spoils this row's outputs, and only them
            lo = hi = _mm512_setzero_ps();
        } else if (absmax >= 1e-30f) {
            scale = absmax / 127.0f;
            inverse = 127.0f / absmax;
        }
        const __m512i qlo = _mm512_cvtps_epi32(_mm512_mul_ps(lo, _mm512_set1_ps(inverse)));
        const __m512i qhi = _mm512_cvtps_epi32(_mm512_mul_ps(hi, _mm512_set1_ps(inverse)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm512_cvtepi32_epi8(qlo));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16), _mm512_cvtepi32_epi8(qhi));
        store_unit_facts(p, zero, qlo, qhi, scale, out);
    }
}

void prepare_fine(const Packed& p, const float* x, const uint8_t* coarse, uint8_t* out) {
    const int zero = 1 << (p.bits - 1);
    const __m512i most = _mm512_set1_epi32(127), least = _mm512_set1_epi32(-127);
    for (int64_t k = 0; k < p.k; k += 32, coarse += UNIT, out += UNIT) {
        const int64_t live = p.k - k;
        float step;
        std::memcpy(&step, coarse + 32, 4);
        const float scale = step / 256, inverse = step > 0 ? 256 / step : 0;
        __m512i q[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            const int64_t here = live - 16 * i;
            const __mmask16 mask = here >= 16 ? 0xffff : here > 0 ? __mmask16((1 << here) - 1) : 0;
            const __m512 first = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(coarse + 16 * i))));
            const __m512 rest = _mm512_fnmadd_ps(_mm512_set1_ps(step), first, _mm512_maskz_loadu_ps(mask, x + k + 16 * i));
            q[i] = _mm512_cvtps_epi32(_mm512_mul_ps(rest, _mm512_set1_ps(inverse)));
            // A spoiled unit (its step is NaN) has no quants; its scale tells.
            q[i] = inverse > 0 ? _mm512_max_epi32(least, _mm512_min_epi32(most, q[i])) : _mm512_setzero_si512();
            _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 16 * i), _mm512_cvtepi32_epi8(q[i]));
        }
        store_unit_facts(p, zero, q[0], q[1], scale, out);
    }
}

void prepare_bf16(const Packed& p, const float* x, uint8_t* out) {
    for (int64_t k = 0; k < p.k; k += 16) {
        const __mmask16 live = p.k - k >= 16 ? 0xffff : __mmask16((1 << (p.k - k)) - 1);
        const __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(live, x + k));
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
        const __mmask16 nan = _mm512_cmp_ps_mask(_mm512_castsi512_ps(bits), _mm512_castsi512_ps(bits), _CMP_UNORD_Q);
        rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x400000));
        const int64_t padded = (p.k + 1) / 2 * 2 - k;
        const __mmask16 write = padded >= 16 ? 0xffff : __mmask16((1 << padded) - 1);
        _mm256_mask_storeu_epi16(out + 2 * k, write, _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
    }
}

// ------------------------------------------------------------------------------------------------ epilogues

// exp(x), relative error below 2e-7 where the result is a normal number; Cody and Waite's reduction, Taylor's series on |r| <= ln(2) / 2.
inline __m512 exp_ps(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-104.0f), _mm512_min_ps(_mm512_set1_ps(88.7f), x));  // the second operand is kept when it is NaN
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 y = _mm512_set1_ps(1.0f / 5040);
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 720));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 120));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 24));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f / 6));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(0.5f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    y = _mm512_fmadd_ps(y, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(y, n);
}

inline __mmask16 first(int columns) { return __mmask16((1u << columns) - 1); }

inline __m512 bias_ps(const float* bias, int columns) {
    return bias ? _mm512_maskz_loadu_ps(first(columns), bias) : _mm512_setzero_ps();
}

void finish(const float* acc, int rows, const Store& to) {
    for (int b = 0; b < 2; ++b) {
        const __mmask16 live = first(to.columns[b]);
        const __m512 bias = bias_ps(to.bias[b], to.columns[b]);
        for (int m = 0; m < rows; ++m)
            _mm512_mask_storeu_ps(to.out + m * to.stride + b * 16, live, _mm512_add_ps(_mm512_load_ps(acc + m * STRIP + b * 16), bias));
    }
}

void finish_gated(const float* acc, int rows, const Store& to) {
    const __mmask16 live = first(to.columns[0]);
    const __m512 gate_bias = bias_ps(to.bias[0], to.columns[0]), up_bias = bias_ps(to.bias[1], to.columns[1]);
    for (int m = 0; m < rows; ++m) {
        __m512 gate = _mm512_add_ps(_mm512_load_ps(acc + m * STRIP), gate_bias);
        __m512 up = _mm512_add_ps(_mm512_load_ps(acc + m * STRIP + 16), up_bias);
        __m512 inner = gate;
        if (to.activation == GELU_TANH) {  // g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3))
            const __m512 cube = _mm512_mul_ps(_mm512_mul_ps(gate, gate), gate);
            inner = _mm512_mul_ps(_mm512_set1_ps(1.5957691216057308f), _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, gate));
        } else if (to.activation == SWIGLU_CLAMPED) {  // min and max give their second operand where one is NaN
            const __m512 limit = _mm512_set1_ps(SWIGLU_LIMIT);
            gate = _mm512_min_ps(limit, gate);
            up = _mm512_max_ps(_mm512_set1_ps(-SWIGLU_LIMIT), _mm512_min_ps(limit, up));
            up = _mm512_add_ps(up, _mm512_set1_ps(1.0f));
            inner = _mm512_mul_ps(_mm512_set1_ps(SWIGLU_ALPHA), gate);
        }
        const __m512 e = exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), inner));
        const __m512 active = _mm512_div_ps(gate, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
        _mm512_mask_storeu_ps(to.out + m * to.stride, live, _mm512_mul_ps(active, up));
    }
}

}  // namespace
}  // namespace tw
TW_TARGET_END

TW_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma,f16c,avx2")
namespace tw {
namespace {

template <int ROWS>
void tile_bf16(const Packed& p, const Strip& s, const uint8_t* x, int64_t x_stride, float* acc) {
    __m512 sum[2][ROWS];
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m) sum[0][m] = sum[1][m] = _mm512_setzero_ps();
    for (int64_t k = 0; k < (p.k + 1) / 2; ++k) {
        const __m512bh a = (__m512bh)_mm512_load_si512(s.w0 + k * 64), b = (__m512bh)_mm512_load_si512(s.w1 + k * 64);
#pragma GCC unroll 16
        for (int m = 0; m < ROWS; ++m) {
            int32_t value;
            std::memcpy(&value, x + m * x_stride + k * 4, 4);
            const __m512bh two = (__m512bh)_mm512_set1_epi32(value);
            sum[0][m] = _mm512_dpbf16_ps(sum[0][m], a, two);
            sum[1][m] = _mm512_dpbf16_ps(sum[1][m], b, two);
        }
    }
#pragma GCC unroll 16
    for (int m = 0; m < ROWS; ++m)
#pragma GCC unroll 2
        for (int b = 0; b < 2; ++b) _mm512_store_ps(acc + m * STRIP + b * 16, sum[b][m]);
}
TW_ROWS(tile_bf16)

}  // namespace
}  // namespace tw
TW_TARGET_END

namespace tw {

Path avx512_path(const Packed& p, bool bf16) {
    Path path{12, tile_f32_rows, nullptr, finish, finish_gated, nullptr, nullptr};
    if (p.layout == LAYOUT_BF16) {
        path.tile = bf16 ? tile_bf16_rows : tile_bf16_wide_rows;
        path.prepare = prepare_bf16;
    } else if (p.layout == LAYOUT_QUANT) {
        path.max_rows = 6;  // 12 dots and 12 sums fit in the registers; 8 or 10 rows with the sums in memory were 3 to 10 % slower
        path.prepare = prepare_quant;
        path.prepare_fine = prepare_fine;
        path.tile = choose_bits<1>(p);
        path.tile_two = choose_bits<2>(p);
    }
    return path;
}

}  // namespace tw
#endif
