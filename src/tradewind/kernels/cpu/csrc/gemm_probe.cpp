// What the machine can do at most: the ceilings that benchmarks compare the matmuls with.
//
// Knows: loops without memory (multiply-accumulate peak) and loops without arithmetic (read bandwidth). Refuses to know: matrices.
#include <cstdint>

#include "gemm.h"
#include "runtime.h"

#if defined(__x86_64__)
#include <immintrin.h>

namespace tw {
namespace {

TW_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,fma,f16c,avx2")

// 24 independent chains hide the latency of any of these instructions.
int peak_int8(int64_t rounds) {
    __m512i acc[24], a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(1);
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) acc[i] = _mm512_set1_epi32(i);
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
        for (int i = 0; i < 24; ++i) {
            acc[i] = _mm512_dpbusd_epi32(acc[i], a, b);
            __asm__ volatile("" : "+v"(acc[i]));
        }
    }
#pragma GCC unroll 24
    for (int i = 1; i < 24; ++i) acc[0] = _mm512_add_epi32(acc[0], acc[i]);
    return _mm_cvtsi128_si32(_mm512_castsi512_si128(acc[0]));
}

int peak_bf16(int64_t rounds) {
    __m512 acc[24];
    const __m512bh a = (__m512bh)_mm512_set1_epi16(0x3f80), b = a;
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) acc[i] = _mm512_setzero_ps();
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
        for (int i = 0; i < 24; ++i) {
            acc[i] = _mm512_dpbf16_ps(acc[i], a, b);
            __asm__ volatile("" : "+v"(acc[i]));
        }
    }
#pragma GCC unroll 24
    for (int i = 1; i < 24; ++i) acc[0] = _mm512_add_ps(acc[0], acc[i]);
    return int(_mm512_cvtss_f32(acc[0]));
}

int peak_f32(int64_t rounds) {
    __m512 acc[24], a = _mm512_set1_ps(0.5f), b = a;
#pragma GCC unroll 24
    for (int i = 0; i < 24; ++i) acc[i] = _mm512_setzero_ps();
    for (int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 24
        for (int i = 0; i < 24; ++i) {
            acc[i] = _mm512_fmadd_ps(acc[i], a, b);
            __asm__ volatile("" : "+v"(acc[i]));
        }
    }
#pragma GCC unroll 24
    for (int i = 1; i < 24; ++i) acc[0] = _mm512_add_ps(acc[0], acc[i]);
    return int(_mm512_cvtss_f32(acc[0]));
}

int read_lines(const uint8_t* from, int64_t bytes) {
    __m512i acc[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) acc[i] = _mm512_setzero_si512();
    for (int64_t at = 0; at + 512 <= bytes; at += 512)
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) acc[i] = _mm512_xor_si512(acc[i], _mm512_loadu_si512(from + at + 64 * i));
#pragma GCC unroll 8
    for (int i = 1; i < 8; ++i) acc[0] = _mm512_xor_si512(acc[0], acc[i]);
    return _mm_cvtsi128_si32(_mm512_castsi512_si128(acc[0]));
}

TW_TARGET_END

}  // namespace

// kind (0 int8, 1 bf16, 2 f32), rounds, int32 [threads] that receives something. A round is 24 instructions a thread, each of
// 128 (int8), 64 (bf16) or 32 (f32) operations. Does nothing below AVX512_BF16.
TW_OP(probe_peak, 3) {
    if (t.isa < AVX512_BF16) return;
    auto* out = ptr<int32_t>(a[2]) + t.id;
    *out = a[0].i == 0 ? peak_int8(a[1].i) : a[0].i == 1 ? peak_bf16(a[1].i) : peak_f32(a[1].i);
}

// from, bytes, int32 [threads]: reads all bytes once, each thread its part.
TW_OP(probe_read, 3) {
    if (t.isa < AVX512_BF16) return;
    const Thread::Range part = t.share(a[1].i, 4096);
    ptr<int32_t>(a[2])[t.id] = read_lines(ptr<uint8_t>(a[0]) + part.begin, part.end - part.begin);
}

}  // namespace tw
#endif
