// Sixteen floats at a time, on any CPU: the compiler's vector types, with intrinsics where they are not enough. No guard: each_level.h
// includes it once per level.
//
// A Vec is one register with AVX-512, two with AVX2, four with SSE2 or NEON. All levels run the same operations in the same order; they
// differ in fused multiply-adds and in nothing else, so what holds for one level's results (independence of batch mates) holds for all.
namespace tw {
namespace TW_NS {
namespace {

#define TW_INLINE inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(64)));
typedef int32_t IVec __attribute__((vector_size(64)));
typedef double DVec __attribute__((vector_size(64)));
typedef float LooseVec __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t LooseIVec __attribute__((vector_size(64), aligned(4), may_alias));
constexpr int W = 16;

TW_INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
TW_INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }

TW_INLINE Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
TW_INLINE void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
TW_INLINE IVec load_int(const int32_t* p) { return *reinterpret_cast<const LooseIVec*>(p); }
TW_INLINE Vec splat(float x) {
#if TW_LEVEL == 2
    return (Vec)_mm512_set1_ps(x);
#elif TW_LEVEL == 1
    if (__builtin_constant_p(x)) return Vec{} + x;
    union {
        __m256 half[2];
        Vec whole;
    } u;
    u.half[0] = u.half[1] = _mm256_set1_ps(x);
    return u.whole;
#else
    return Vec{} + x;
#endif
}
TW_INLINE IVec splat_int(int32_t x) { return IVec{} + x; }
TW_INLINE IVec bits(Vec v) { return (IVec)v; }
TW_INLINE Vec floats(IVec v) { return (Vec)v; }
TW_INLINE Vec select(IVec mask, Vec yes, Vec no) { return mask ? yes : no; }
TW_INLINE IVec iota() { return IVec{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

// a * b + c
TW_INLINE Vec fma(Vec a, Vec b, Vec c) {
#if TW_LEVEL == 2
    return (Vec)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#else
    return a * b + c;
#endif
}
// Gives b where either is NaN.
TW_INLINE Vec larger(Vec a, Vec b) {
#if TW_LEVEL == 2
    return (Vec)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// The first n lanes of p, the rest `other`; reads nothing beyond p + n.
TW_INLINE Vec load_part(const float* p, int64_t n, float other) {
    Vec v = splat(other);
    __builtin_memcpy(&v, p, n * sizeof(float));
    return v;
}
TW_INLINE void store_part(float* p, int64_t n, Vec v) { __builtin_memcpy(p, &v, n * sizeof(float)); }

// Always the same tree: lanes i and i + 8, then i and i + 4, then + 2, then + 1.
TW_INLINE float sum(Vec v) {
#if TW_LEVEL == 2
    return _mm512_reduce_add_ps((__m512)v);
#endif
    float a[W];
    store(a, v);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) a[i] += a[i + half];
    return a[0];
}
TW_INLINE float largest(Vec v) {
#if TW_LEVEL == 2
    return _mm512_reduce_max_ps((__m512)v);
#else
    float a[W];
    store(a, v);
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; ++i) a[i] = a[i] > a[i + half] ? a[i] : a[i + half];
    return a[0];
#endif
}

// ------------------------------------------------------------------------------------------------------------ half floats

typedef uint16_t HVec __attribute__((vector_size(32)));
typedef uint16_t LooseHVec __attribute__((vector_size(32), aligned(2), may_alias));
typedef uint32_t UVec __attribute__((vector_size(64)));

TW_INLINE float half_to_float(uint16_t h) {
    // The exponent of a half is moved by a multiplication, which also makes subnormals right.
    uint32_t u = (uint32_t)(h & 0x7fff) << 13, sign = (uint32_t)(h & 0x8000) << 16;
    float f;
    __builtin_memcpy(&f, &u, 4);
    f *= 0x1p112f;
    __builtin_memcpy(&u, &f, 4);
    if ((h & 0x7c00) == 0x7c00) u |= 0x7f800000;
    u |= sign;
    __builtin_memcpy(&f, &u, 4);
    return f;
}
// To the nearest even; what is too large becomes 65504, NaN stays NaN.
TW_INLINE uint16_t float_to_half(float f) {
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    uint32_t sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (a >= 0x477ff000) return (uint16_t)(sign | 0x7bff);
    if (a < 0x38800000) {  // a subnormal half: the addition rounds it to a multiple of 2^-24
        float g;
        __builtin_memcpy(&g, &a, 4);
        g += 0.5f;
        __builtin_memcpy(&a, &g, 4);
        return (uint16_t)(sign | (a - 0x3f000000));
    }
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | (a - 0x38000000) >> 13);
}
TW_INLINE float bf16_to_float(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    __builtin_memcpy(&f, &u, 4);
    return f;
}
TW_INLINE uint16_t float_to_bf16(float f) {
    uint32_t u;
    __builtin_memcpy(&u, &f, 4);
    if ((u & 0x7fffffff) > 0x7f800000) return (uint16_t)(u >> 16 | 0x40);
    if ((u & 0x7fffffff) >= 0x7f7f8000) return (uint16_t)((u >> 16 & 0x8000) | 0x7f7f);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

// The formats of keys and values.
struct F32 {
    typedef float Stored;
    static TW_INLINE Vec load16(const float* p) { return load(p); }
    static TW_INLINE float put(float x) { return x; }
};
struct F16 {
    typedef uint16_t Stored;
    static TW_INLINE Vec load16(const uint16_t* p) {
#if TW_LEVEL == 2
        return (Vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif TW_LEVEL == 1
        union {
            __m256 half[2];
            Vec whole;
        } u;
        u.half[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
        u.half[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)));
        return u.whole;
#else
        UVec h = __builtin_convertvector(*(const LooseHVec*)p, UVec);
        UVec u = (UVec)((Vec)((h & 0x7fff) << 13) * 0x1p112f);
        UVec infinite = (UVec)((h & 0x7c00) == 0x7c00);
        return (Vec)(u | (infinite & 0x7f800000u) | (h & 0x8000) << 16);
#endif
    }
    static TW_INLINE uint16_t put(float x) { return float_to_half(x); }
};
struct BF16 {
    typedef uint16_t Stored;
    static TW_INLINE Vec load16(const uint16_t* p) {
        return (Vec)(__builtin_convertvector(*(const LooseHVec*)p, UVec) << 16);
    }
    static TW_INLINE uint16_t put(float x) { return float_to_bf16(x); }
};

// ------------------------------------------------------------------------------------------------------- in registers
//
// A Vec that is wider than a register lives in memory between operations (GCC 12). Wide is the same sixteen floats as a struct of
// registers, for the loops where that counts.
#if TW_LEVEL == 2
typedef Vec Wide;
TW_INLINE Wide wide_splat(float x) { return splat(x); }
TW_INLINE Wide wide_fma(Wide a, Wide b, Wide c) { return fma(a, b, c); }
template <class Format>
TW_INLINE Wide wide_load(const typename Format::Stored* p) { return Format::load16(p); }
TW_INLINE void wide_store(float* p, Wide v) { store(p, v); }
#else
constexpr int PIECES = TW_LEVEL == 1 ? 2 : 4, LANES_EACH = W / PIECES;
typedef float Register __attribute__((vector_size(LANES_EACH * 4)));
typedef float LooseRegister __attribute__((vector_size(LANES_EACH * 4), aligned(4), may_alias));
typedef uint32_t URegister __attribute__((vector_size(LANES_EACH * 4)));
typedef uint16_t LooseHalves __attribute__((vector_size(LANES_EACH * 2), aligned(2), may_alias));
struct Wide {
    Register r[PIECES];
};
TW_INLINE Wide wide_splat(float x) {
    Wide v;
    for (int i = 0; i < PIECES; ++i) v.r[i] = Register{} + x;
    return v;
}
TW_INLINE Wide wide_fma(Wide a, Wide b, Wide c) {
    for (int i = 0; i < PIECES; ++i)
#if TW_LEVEL == 1
        c.r[i] = (Register)_mm256_fmadd_ps((__m256)a.r[i], (__m256)b.r[i], (__m256)c.r[i]);
#else
        c.r[i] = a.r[i] * b.r[i] + c.r[i];
#endif
    return c;
}
TW_INLINE Register load_register(F32*, const float* p) { return *reinterpret_cast<const LooseRegister*>(p); }
TW_INLINE Register load_register(BF16*, const uint16_t* p) {
    return (Register)(__builtin_convertvector(*reinterpret_cast<const LooseHalves*>(p), URegister) << 16);
}
TW_INLINE Register load_register(F16*, const uint16_t* p) {
#if TW_LEVEL == 1
    return (Register)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    URegister h = __builtin_convertvector(*reinterpret_cast<const LooseHalves*>(p), URegister);
    URegister u = (URegister)((Register)((h & 0x7fff) << 13) * 0x1p112f);
    URegister infinite = (URegister)((h & 0x7c00) == 0x7c00);
    return (Register)(u | (infinite & 0x7f800000u) | (h & 0x8000) << 16);
#endif
}
template <class Format>
TW_INLINE Wide wide_load(const typename Format::Stored* p) {
    Wide v;
    for (int i = 0; i < PIECES; ++i) v.r[i] = load_register((Format*)nullptr, p + i * LANES_EACH);
    return v;
}
TW_INLINE void wide_store(float* p, Wide v) {
    for (int i = 0; i < PIECES; ++i) *reinterpret_cast<LooseRegister*>(p + i * LANES_EACH) = v.r[i];
}
#endif

// ------------------------------------------------------------------------------------------------------------ functions

// 2^n * v for whole n; 0 below 2^-126 on the levels without an instruction for it.
TW_INLINE Vec scale_by_power(Vec v, Vec n) {
#if TW_LEVEL == 2
    return (Vec)_mm512_scalef_ps((__m512)v, (__m512)n);
#else
    Vec safe = n < -126.f ? splat(-126.f) : n;
    safe = safe > 127.f ? splat(127.f) : safe;
    IVec power = (__builtin_convertvector(safe, IVec) + 127) << 23;
    Vec result = v * floats(power);
    result = n < -126.f ? splat(0.f) : result;
    return n > 127.f ? result * splat(2.f) : result;  // 2^128: the arguments of exp here never ask for more
#endif
}
TW_INLINE Vec nearest(Vec v) {
#if TW_LEVEL == 2
    return (Vec)_mm512_roundscale_ps((__m512)v, 8);
#else
    // Adding 1.5 * 2^23 leaves no bits for a fraction; larger numbers (and NaN) have none.
    Vec rounded = (v + 0x1.8p23f) - 0x1.8p23f;
    Vec size = floats(bits(v) & 0x7fffffff);
    return size < 0x1p22f ? rounded : v;
#endif
}
// 2^x; relative error below 1.3e-7; 0 for -inf. (Minimax polynomial of degree 6 on [-1/2, 1/2], by Remez exchange.)
TW_INLINE Vec exp2(Vec x) {
    x = larger(splat(-200.f), x);
    Vec n = nearest(x), r = x - n;
    Vec p = splat(1.5345812e-4f);
    p = fma(p, r, splat(1.3399931e-3f));
    p = fma(p, r, splat(9.618489e-3f));
    p = fma(p, r, splat(5.5503288e-2f));
    p = fma(p, r, splat(2.40226469e-1f));
    p = fma(p, r, splat(6.93147205e-1f));
    p = fma(p, r, splat(1.f));
    return scale_by_power(p, n);
}
// e^x; relative error below 2e-7 where the result is a normal float. ln 2 is subtracted in two pieces (Cody & Waite).
TW_INLINE Vec exp(Vec x) {
    x = larger(splat(-150.f), x);
    Vec n = nearest(x * 1.44269504f);
    Vec r = fma(n, splat(-6.93359375e-1f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Vec p = splat(1.3836843e-3f);
    p = fma(p, r, splat(8.3748158e-3f));
    p = fma(p, r, splat(4.1668226e-2f));
    p = fma(p, r, splat(1.66664201e-1f));
    p = fma(p, r, splat(4.9999998e-1f));
    p = fma(p, r, splat(1.00000004f));
    p = fma(p, r, splat(1.f));
    return scale_by_power(p, n);
}
// tanh; relative error below 4e-7. A polynomial near 0, where 1 - 2 / (e^2x + 1) would cancel.
TW_INLINE Vec tanh(Vec x) {
    Vec size = floats(bits(x) & 0x7fffffff);
    Vec square = x * x;
    Vec p = splat(-5.852168633e-3f);
    p = fma(p, square, splat(2.075362886e-2f));
    p = fma(p, square, splat(-5.376870470e-2f));
    p = fma(p, square, splat(1.333168896e-1f));
    p = fma(p, square, splat(-3.333328326e-1f));
    p = fma(p * square, x, x);
    Vec capped = size > 20.f ? splat(20.f) : size;
    Vec far = 1.f - 2.f / (exp(capped + capped) + 1.f);
    far = floats(bits(far) | (bits(x) & (int32_t)0x80000000));
    Vec result = size < 0.6f ? p : far;
    return x != x ? x : result;
}

// Sixteen float64 sums as two vectors: sums of many terms in a fixed order (lane by lane, lanes in order at the end).
struct Sum64 {
    DVec low{}, high{};
    TW_INLINE void add(Vec v) {
#if TW_LEVEL == 2
        low += (DVec)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)v));
        high += (DVec)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)v, 1));
#else
        float a[W];
        store(a, v);
        for (int i = 0; i < 8; ++i) low[i] += a[i], high[i] += a[i + 8];
#endif
    }
    TW_INLINE double total() const {
        double t = 0;
        for (int i = 0; i < 8; ++i) t += low[i] + high[i];
        return t;
    }
};

}  // namespace
}  // namespace TW_NS
}  // namespace tw
