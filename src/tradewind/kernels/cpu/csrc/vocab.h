// One row of logits as pieces of a fixed size, and the exact choice of its best tokens without a sort. No guard: included once per level.
//
// Every sum is made piece by piece in a fixed order, so it is the same whether one thread walks the row or several share it.
namespace tw {
namespace TW_NS {
namespace {

constexpr int64_t PIECE = 4096;  // tokens
constexpr int64_t STRIPE = 64;   // vectors whose lane maxima are kept: 16 numbers for 1,024 tokens

TW_INLINE int64_t pieces(int64_t vocab) { return (vocab + PIECE - 1) / PIECE; }

// What is known about a piece after it was read once.
struct Piece {
    float largest;
    int32_t has_nan;
    double sum;
    float maxima[PIECE / STRIPE];  // each is the largest of 64 tokens: their k-th largest is a lower bound of the k-th largest token
};

TW_INLINE Vec load_at_most(const float* x, int64_t left) { return left >= W ? load(x) : load_part(x, left, -__builtin_inff()); }

// Reads n tokens; sets those that the grammar forbids to -inf first.
void survey(float* x, int64_t n, const uint32_t* allowed, Piece& piece) {
    const float lowest = -__builtin_inff();
    IVec nan{};
    Vec best = splat(lowest);
    int64_t stripe = 0;
    for (int64_t begin = 0; begin < PIECE; begin += STRIPE * W, ++stripe) {
        Vec lanes = splat(lowest);
        for (int64_t i = begin; i < begin + STRIPE * W && i < n; i += W) {
            Vec v = load_at_most(x + i, n - i);
            if (allowed) {
                const int32_t word = (int32_t)(allowed[i / 32] >> i % 32);
                v = select(((splat_int(word) >> iota()) & 1) != 0, v, splat(lowest));
                if (n - i >= W) store(x + i, v);
                else store_part(x + i, n - i, v);
            }
            nan |= v != v;
            lanes = larger(v, lanes);
        }
        store(piece.maxima + stripe * W, lanes);
        best = larger(lanes, best);
    }
    piece.largest = largest(best);
    int32_t any = 0;
    for (int i = 0; i < W; ++i) any |= nan[i];
    piece.has_nan = any;
}

// exp((x - peak) / temperature), 0 where that is below `least`.
TW_INLINE Vec weight(Vec x, Vec peak, Vec inverse_temperature, Vec least) {
    Vec e = exp((x - peak) * inverse_temperature);
    return select(e >= least, e, splat(0));
}
struct Tempered {
    float peak, inverse_temperature, least;
};
double sum_weights(const float* x, int64_t n, Tempered by) {
    const Vec peak = splat(by.peak), inverse = splat(by.inverse_temperature), least = splat(by.least);
    Sum64 sum;
    for (int64_t i = 0; i < n; i += W) sum.add(weight(load_at_most(x + i, n - i), peak, inverse, least));
    return sum.total();
}

// Floats as integers in the same order (-0 equals 0 when 0 was added before).
TW_INLINE UVec keys_of(Vec v) {
    IVec b = bits(v);
    return (UVec)(b ^ ((b >> 31) | (int32_t)0x80000000));
}
TW_INLINE uint32_t key_of(float x) {
    uint32_t b;
    __builtin_memcpy(&b, &x, 4);
    return b ^ (b >> 31 ? 0xffffffffu : 0x80000000u);
}

// Some tokens of a row in order of id. Arrays have room for a vector more than the vocabulary.
struct Candidates {
    float *x, *e;
    int32_t* id;
    int64_t count;
    static size_t bytes(int64_t vocab) { return 3 * (vocab + 2 * W) * sizeof(float); }
    Candidates(void* memory, int64_t vocab) : count(0) {
        x = static_cast<float*>(memory), e = x + vocab + 2 * W, id = reinterpret_cast<int32_t*>(e + vocab + 2 * W);
    }
};

// All tokens with x >= least.
void collect(const float* x, int64_t vocab, float least, Candidates& to) {
    const Vec bound = splat(least);
    int64_t n = 0;
    for (int64_t i = 0; i < vocab; i += W) {
        const int64_t live = lesser(W, vocab - i);
        Vec v = load_at_most(x + i, vocab - i);
#if TW_LEVEL == 2
        __mmask16 found = _mm512_cmp_ps_mask((__m512)v, (__m512)bound, _CMP_GE_OQ) & (__mmask16)((1u << live) - 1);
        if (!found) continue;
        store(to.x + n, (Vec)_mm512_maskz_compress_ps(found, (__m512)(v + 0.f)));
        _mm512_storeu_si512(to.id + n, _mm512_maskz_compress_epi32(found, (__m512i)(iota() + (int32_t)i)));
        n += __builtin_popcount(found);
#else
        if (!(largest(v) >= least)) continue;
        for (int64_t lane = 0; lane < live; ++lane)
            if (v[lane] >= least) to.x[n] = v[lane] + 0.f, to.id[n] = (int32_t)(i + lane), ++n;
#endif
    }
    to.count = n;
    store(to.x + n, splat(-__builtin_inff()));
}

// The largest key for which enough(key) still holds; enough must hold for fewer keys the larger they are. 0 when it never does.
template <class Enough>
TW_INLINE uint32_t largest_key(Enough&& enough) {
    uint32_t key = 0;
    for (uint32_t bit = 0x80000000u; bit; bit >>= 1)
        if (enough(key | bit)) key |= bit;
    return key;
}
TW_INLINE int64_t count_from(const float* x, int64_t n, uint32_t least) {
    IVec count{};
    const UVec bound = UVec{} + least;
    int64_t i = 0;
    for (; i + W <= n; i += W) count -= (IVec)(keys_of(load(x + i)) >= bound);
    int64_t total = 0;
    for (int lane = 0; lane < W; ++lane) total += count[lane];
    for (; i < n; ++i) total += key_of(x[i]) >= least;
    return total;
}
// The k-th largest of n numbers, as a key; 1 <= k <= n.
uint32_t kth_largest(const float* x, int64_t n, int64_t k) {
    return largest_key([&](uint32_t key) { return count_from(x, n, key) >= k; });
}
TW_INLINE float float_of(uint32_t key) {
    uint32_t b = key ^ (key >> 31 ? 0x80000000u : 0xffffffffu);
    float x;
    __builtin_memcpy(&x, &b, 4);
    return x;
}

// Exactly the k largest tokens of a surveyed row without NaN, the lower id first among equals; k <= vocab.
void collect_largest(const float* x, int64_t vocab, int64_t k, const Piece* surveyed, float* maxima, Candidates& to) {
    // A lower bound from the maxima; with too few of them, everything is a candidate.
    const int64_t per_piece = PIECE / STRIPE, n = pieces(vocab) * per_piece;
    float least = -__builtin_inff();
    if (k <= n) {
        for (int64_t i = 0; i < pieces(vocab); ++i)
            for (int64_t j = 0; j < per_piece; j += W) store(maxima + i * per_piece + j, load(surveyed[i].maxima + j) + 0.f);
        least = float_of(kth_largest(maxima, n, k));
    }
    collect(x, vocab, least, to);
    if (to.count <= k) return;
    const uint32_t bound = kth_largest(to.x, to.count, k);
    int64_t above = bound == 0xffffffffu ? 0 : count_from(to.x, to.count, bound + 1), equals = k - above, kept = 0;
    for (int64_t i = 0; i < to.count; ++i) {
        const uint32_t key = key_of(to.x[i]);
        if (key < bound || (key == bound && equals-- <= 0)) continue;
        to.x[kept] = to.x[i], to.id[kept] = to.id[i], ++kept;
    }
    to.count = kept;
}

}  // namespace
}  // namespace TW_NS
}  // namespace tw
