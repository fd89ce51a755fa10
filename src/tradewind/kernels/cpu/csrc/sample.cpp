// Choosing the next token of each row: bias and penalties, grammar mask, temperature, top-k, top-p, min-p, one draw.
//
// No sort. A row is surveyed once (maximum, lane maxima); top-k and top-p find their bound by bisection over the few tokens that can matter;
// the draw walks cumulated weights in order of token id. All decisions use the logits themselves and float64 sums in a fixed order, so that
// a row's token depends on its own logits, its values and (seed, position) only.
#ifndef TW_LEVEL
#include "runtime.h"

#include <cmath>

namespace tw {
namespace {

// Layout of the scratch: for each row and piece of the vocabulary one record (Piece in vocab.h).
constexpr int64_t SAMPLE_PIECE = 4096, SAMPLE_PIECE_BYTES = 272;

double log_of(double x) { return std::log(x); }  // here, so that no level compiles it

struct Columns {
    float* logits;
    int64_t vocab;
    const float* temperature;
    const int32_t* top_k;
    const float *top_p, *min_p, *repetition, *presence, *frequency;
    const uint64_t* seed;
    const int64_t *position, *history;
    const int32_t *history_prompt, *history_length, *bias_start, *bias_token;
    const float* bias_value;
    const uint32_t* mask;
    int32_t* out;

    float* row(int64_t i) const { return logits + i * vocab; }
};

// Philox4x32-10 with key = seed and counter = position (Salmon et al. 2011); a float64 in (0, 1].
double uniform(uint64_t seed, uint64_t position) {
    uint32_t c0 = (uint32_t)position, c1 = (uint32_t)(position >> 32), c2 = 0, c3 = 0, k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = 0xD2511F53ull * c0, b = 0xCD9E8D57ull * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0, c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1, c3 = (uint32_t)a;
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
    return ((double)((uint64_t)c0 << 32 | c1) + 0.5) * 0x1p-64;
}

// Bias, then repetition / presence / frequency penalties. Costs what the lists are long, not the vocabulary.
void steer(const Columns& c, int64_t i, Thread& t) {
    float* x = c.row(i);
    for (int32_t entry = c.bias_start[i]; entry < c.bias_start[i + 1]; ++entry) {
        const int32_t token = c.bias_token[entry];
        if (token >= 0 && token < c.vocab) x[token] += c.bias_value[entry];
    }
    const int32_t known = c.history_length[i];
    if (known <= 0) return;
    const float repetition = c.repetition[i], presence = c.presence[i], frequency = c.frequency[i];
    if (repetition == 1 && presence == 0 && frequency == 0) return;
    const int32_t* history = reinterpret_cast<const int32_t*>(c.history[i]);
    // A counter for each token: generated occurrences, and a mark for "seen at all". Left as zeros.
    uint32_t* seen = static_cast<uint32_t*>(t.scratch(c.vocab * sizeof(uint32_t), Thread::ZEROED));
    for (int32_t at = 0; at < known; ++at) {
        const int32_t token = history[at];
        if (token < 0 || token >= c.vocab) continue;
        seen[token] = (seen[token] + (at >= c.history_prompt[i])) | 0x80000000u;
    }
    for (int32_t at = 0; at < known; ++at) {
        const int32_t token = history[at];
        if (token < 0 || token >= c.vocab || !seen[token]) continue;
        const uint32_t generated = seen[token] & 0x7fffffffu;
        seen[token] = 0;
        x[token] = x[token] > 0 ? x[token] / repetition : x[token] * repetition;
        if (generated) x[token] = x[token] - presence - frequency * (float)generated;
    }
}

}  // namespace
}  // namespace tw

#define TW_SOURCE "sample.cpp"
#include "each_level.h"

// logits, V, temperature, top_k, top_p, min_p, repetition, presence, frequency, seed, position, history, history_prompt, history_length,
// bias_start, bias_token, bias_value, mask (0: none), out, scratch (SAMPLE_PIECE_BYTES a piece), count
TW_OP(sample, 21) {
    using namespace tw;
    const Columns c{ptr<float>(a[0]), a[1].i, ptr<float>(a[2]), ptr<int32_t>(a[3]), ptr<float>(a[4]), ptr<float>(a[5]), ptr<float>(a[6]),
                    ptr<float>(a[7]), ptr<float>(a[8]), ptr<uint64_t>(a[9]), ptr<int64_t>(a[10]), ptr<int64_t>(a[11]), ptr<int32_t>(a[12]),
                    ptr<int32_t>(a[13]), ptr<int32_t>(a[14]), ptr<int32_t>(a[15]), ptr<float>(a[16]), ptr<uint32_t>(a[17]),
                    ptr<int32_t>(a[18])};
    const int64_t rows = live(a[20]), pieces = (c.vocab + SAMPLE_PIECE - 1) / SAMPLE_PIECE;
    auto survey = TW_PICK(t, survey_piece);
    auto weigh = TW_PICK(t, weigh_piece);
    auto choose = TW_PICK(t, choose_token);
    auto surveyed = [&](int64_t row) { return ptr<char>(a[19]) + row * pieces * SAMPLE_PIECE_BYTES; };
    if (t.count == 1 || rows >= 2 * t.count) {
        // A row stays with one thread, and in its cache.
        t.chunks(rows, [&](int64_t row) {
            steer(c, row, t);
            for (int64_t i = 0; i < pieces; ++i) survey(c, row, i, surveyed(row));
            for (int64_t i = 0; i < pieces; ++i) weigh(c, row, i, surveyed(row));
            c.out[row] = choose(c, row, surveyed(row), t);
        });
        return;
    }
    t.chunks(rows, [&](int64_t row) { steer(c, row, t); }, 0);
    t.barrier();
    t.chunks(rows * pieces, [&](int64_t i) { survey(c, i / pieces, i % pieces, surveyed(i / pieces)); }, 1);
    t.barrier();
    t.chunks(rows * pieces, [&](int64_t i) { weigh(c, i / pieces, i % pieces, surveyed(i / pieces)); }, 2);
    t.barrier();
    t.chunks(rows, [&](int64_t row) { c.out[row] = choose(c, row, surveyed(row), t); }, 3);
}

#else
#include "vocab.h"
namespace tw {
namespace TW_NS {
namespace {

static_assert(PIECE == SAMPLE_PIECE && sizeof(Piece) == SAMPLE_PIECE_BYTES, "the caller lays out the scratch");

TW_INLINE int64_t piece_tokens(const Columns& c, int64_t piece) { return lesser(PIECE, c.vocab - piece * PIECE); }

void survey_piece(const Columns& c, int64_t row, int64_t piece, char* surveyed) {
    const uint32_t* allowed = c.mask ? c.mask + row * ((c.vocab + 31) / 32) + piece * PIECE / 32 : nullptr;
    survey(c.row(row) + piece * PIECE, piece_tokens(c, piece), allowed, reinterpret_cast<Piece*>(surveyed)[piece]);
}

struct Overview {
    float peak = -__builtin_inff();
    bool valid = true;
};
Overview overview(const Columns& c, const Piece* surveyed) {
    Overview all;
    for (int64_t i = 0; i < pieces(c.vocab); ++i) {
        if (surveyed[i].has_nan) all.valid = false;
        if (surveyed[i].largest > all.peak) all.peak = surveyed[i].largest;
    }
    if (!(all.peak > -__builtin_inff() && all.peak < __builtin_inff())) all.valid = false;
    return all;
}
TW_INLINE bool keeps_k(const Columns& c, int64_t row) { return c.top_k[row] > 0 && c.top_k[row] < c.vocab; }
Tempered tempered(const Columns& c, int64_t row, float peak) {
    const float inverse = 1.f / c.temperature[row];
    const bool simple = !keeps_k(c, row) && !(c.top_p[row] < 1);  // min-p comes after top-k and top-p
    return {peak, inverse < 1e30f ? inverse : 1e30f, simple ? c.min_p[row] : 0.f};
}

// Sums the weights of a piece where the choice needs the sum over the whole row.
void weigh_piece(const Columns& c, int64_t row, int64_t piece, char* surveyed) {
    if (c.temperature[row] == 0 || keeps_k(c, row)) return;
    Piece* all = reinterpret_cast<Piece*>(surveyed);
    const Overview known = overview(c, all);
    if (!known.valid) return;
    all[piece].sum = sum_weights(c.row(row) + piece * PIECE, piece_tokens(c, piece), tempered(c, row, known.peak));
}

int32_t first_equal(const float* x, int64_t n, float value) {
    for (int64_t i = 0; i < n; ++i)
        if (x[i] == value) return (int32_t)i;
    return -1;
}

// The first token of the row whose cumulated weight exceeds u times the whole.
int32_t draw_from_row(const Columns& c, int64_t row, const Piece* surveyed, Tempered by, double u, Thread& t) {
    double total = 0, before = 0;
    for (int64_t i = 0; i < pieces(c.vocab); ++i) total += surveyed[i].sum;
    const double target = u * total;
    int64_t piece = -1;
    for (int64_t i = 0; i < pieces(c.vocab); ++i) {
        if (surveyed[i].sum == 0) continue;
        if (piece >= 0) before += surveyed[piece].sum;
        piece = i;
        if (before + surveyed[i].sum > target) break;
    }
    // The same inside the piece: 256 tokens, then one.
    const int64_t n = piece_tokens(c, piece), chunk = 256;
    float* e = static_cast<float*>(t.scratch(PIECE * sizeof(float)));
    const float* x = c.row(row) + piece * PIECE;
    const Vec peak = splat(by.peak), inverse = splat(by.inverse_temperature), least = splat(by.least);
    for (int64_t i = 0; i < n; i += W) store(e + i, weight(load_at_most(x + i, n - i), peak, inverse, least));
    int64_t begin = -1;
    double chunk_sum = 0;
    for (int64_t i = 0; i < n; i += chunk) {
        Sum64 sum;
        for (int64_t j = i; j < i + chunk && j < n; j += W) sum.add(load(e + j));
        const double s = sum.total();
        if (s == 0) continue;
        if (begin >= 0) before += chunk_sum;
        begin = i, chunk_sum = s;
        if (before + s > target) break;
    }
    int32_t token = -1;
    for (int64_t i = begin; i < begin + chunk && i < n; ++i) {
        if (e[i] == 0) continue;
        token = (int32_t)(piece * PIECE + i);
        before += e[i];
        if (before > target) break;
    }
    return token;
}

// Keeps the shortest head, sorted downwards, whose weight reaches `target`.
void keep_mass(Candidates& c, double target) {
    auto mass_from = [&](uint32_t key) {
        const UVec bound = UVec{} + key;
        Sum64 sum;
        for (int64_t i = 0; i < c.count; i += W) sum.add(select((IVec)(keys_of(load(c.x + i)) >= bound), load(c.e + i), splat(0)));
        return sum.total();
    };
    const uint32_t bound = largest_key([&](uint32_t key) { return mass_from(key) >= target; });
    double before = bound == 0xffffffffu ? 0 : mass_from(bound + 1);
    int64_t kept = 0;
    for (int64_t i = 0; i < c.count; ++i) {
        const uint32_t key = key_of(c.x[i]);
        if (key < bound) continue;
        if (key == bound) {
            if (before >= target && kept > 0) continue;
            before += c.e[i];
        }
        c.x[kept] = c.x[i], c.e[kept] = c.e[i], c.id[kept] = c.id[i], ++kept;
    }
    c.count = kept;
}

int32_t choose_token(const Columns& c, int64_t row, char* bytes, Thread& t) {
    const Piece* surveyed = reinterpret_cast<const Piece*>(bytes);
    const Overview known = overview(c, surveyed);
    if (!known.valid) return -1;
    const float* x = c.row(row);
    if (c.temperature[row] == 0) {
        for (int64_t i = 0; i < pieces(c.vocab); ++i)
            if (surveyed[i].largest == known.peak) return (int32_t)(i * PIECE) + first_equal(x + i * PIECE, piece_tokens(c, i), known.peak);
        return -1;
    }
    const double u = uniform(c.seed[row], (uint64_t)c.position[row]);
    const Tempered by = tempered(c, row, known.peak);
    const float top_p = c.top_p[row];
    if (!keeps_k(c, row) && !(top_p < 1)) return draw_from_row(c, row, surveyed, by, u, t);

    Candidates few(t.scratch(Candidates::bytes(c.vocab)), c.vocab);
    double total = 0;
    if (keeps_k(c, row)) {
        float* maxima = static_cast<float*>(t.scratch(pieces(c.vocab) * (PIECE / STRIPE) * sizeof(float), Thread::MORE));
        collect_largest(x, c.vocab, c.top_k[row], surveyed, maxima, few);
    } else {
        for (int64_t i = 0; i < pieces(c.vocab); ++i) total += surveyed[i].sum;
        // Tokens lighter than (1 - p) / V of the whole weigh less than 1 - p together: none of them is in the head.
        const double lightest = log_of((1.0 - (double)top_p) * total / (double)c.vocab) - 0.01;
        const double least = known.peak + lightest / (double)by.inverse_temperature - 1e-6 * (double)(known.peak < 0 ? -known.peak : known.peak);
        collect(x, c.vocab, (float)least, few);
    }
    const Vec peak = splat(by.peak), inverse = splat(by.inverse_temperature);
    store(few.x + few.count, splat(-__builtin_inff()));
    for (int64_t i = 0; i < few.count; i += W) store(few.e + i, weight(load(few.x + i), peak, inverse, splat(0)));
    if (keeps_k(c, row)) {
        Sum64 sum;
        for (int64_t i = 0; i < few.count; i += W) sum.add(load(few.e + i));
        total = sum.total();
    }
    if (top_p < 1) keep_mass(few, (double)top_p * total);

    const float least = c.min_p[row];
    double kept = 0;
    for (int64_t i = 0; i < few.count; ++i) {
        if (few.e[i] < least) few.e[i] = 0;
        kept += few.e[i];
    }
    const double target = u * kept;
    double before = 0;
    int32_t token = -1;
    for (int64_t i = 0; i < few.count; ++i) {
        if (few.e[i] == 0) continue;
        token = few.id[i];
        before += few.e[i];
        if (before > target) break;
    }
    return token;
}

}  // namespace
}  // namespace TW_NS
}  // namespace tw
#endif
