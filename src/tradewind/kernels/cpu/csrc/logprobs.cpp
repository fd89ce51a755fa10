// Log-probabilities of raw logits: of a given token, its rank, and the best tokens.
#ifndef TW_LEVEL
#include "runtime.h"

#include <cmath>

namespace tw {
namespace {
double natural_log(double x) { return std::log(x); }  // here, so that no level compiles it
}
}  // namespace tw

#define TW_SOURCE "logprobs.cpp"
#include "each_level.h"

// logits, V, tokens, top, out_logprob, out_rank, out_ids, out_top, count
TW_OP(logprobs, 9) {
    using namespace tw;
    auto row_logprobs = TW_PICK(t, row_logprobs);
    const int64_t vocab = a[1].i, top = a[3].i;
    t.chunks(live(a[8]), [&](int64_t i) {
        row_logprobs(ptr<float>(a[0]) + i * vocab, vocab, ptr<int32_t>(a[2])[i], top, ptr<float>(a[4]) + i, ptr<int32_t>(a[5]) + i,
                     ptr<int32_t>(a[6]) + i * top, ptr<float>(a[7]) + i * top, t);
    });
}

#else
#include "vocab.h"
namespace tw {
namespace TW_NS {
namespace {

// Tokens ahead of `token`: larger logits, and equal ones of a lower id.
int64_t ahead_of(const float* x, int64_t vocab, int64_t token) {
    const Vec own = splat(x[token]);
    IVec ahead{};
    for (int64_t i = 0; i < vocab; i += W) {
        const Vec v = load_at_most(x + i, vocab - i);  // beyond the row: -inf with a higher id
        ahead -= v > own;
        ahead -= (v == own) & (iota() + (int32_t)i < (int32_t)token);
    }
    int64_t total = 0;
    for (int lane = 0; lane < W; ++lane) total += ahead[lane];
    return total;
}

void row_logprobs(const float* x, int64_t vocab, int64_t token, int64_t top, float* logprob, int32_t* rank, int32_t* ids, float* best,
                  Thread& t) {
    const int64_t n = pieces(vocab);
    const size_t surveyed_bytes = n * sizeof(Piece);
    Piece* surveyed = static_cast<Piece*>(t.scratch(surveyed_bytes + n * (PIECE / STRIPE) * sizeof(float), Thread::MORE));
    float* maxima = reinterpret_cast<float*>(surveyed + n);
    float peak = -__builtin_inff();
    bool nan = token < 0 || token >= vocab;
    for (int64_t i = 0; i < n; ++i) {
        // Without a mask nothing is written.
        survey(const_cast<float*>(x) + i * PIECE, lesser(PIECE, vocab - i * PIECE), nullptr, surveyed[i]);
        if (surveyed[i].largest > peak) peak = surveyed[i].largest;
        nan |= surveyed[i].has_nan != 0;
    }
    if (nan || !(peak > -__builtin_inff() && peak < __builtin_inff())) {
        *logprob = __builtin_nanf("");
        *rank = (int32_t)vocab;
        for (int64_t i = 0; i < top; ++i) ids[i] = (int32_t)i, best[i] = __builtin_nanf("");
        return;
    }
    double total = 0;
    for (int64_t i = 0; i < n; ++i) total += sum_weights(x + i * PIECE, lesser(PIECE, vocab - i * PIECE), {peak, 1, 0});
    const double normaliser = (double)peak + natural_log(total);
    *logprob = (float)((double)x[token] - normaliser);
    *rank = (int32_t)ahead_of(x, vocab, token) + 1;
    if (top == 0) return;
    Candidates few(t.scratch(Candidates::bytes(vocab)), vocab);
    collect_largest(x, vocab, top, surveyed, maxima, few);
    // Insertion sort, stable: `top` is small.
    for (int64_t i = 0; i < few.count; ++i) {
        const float v = few.x[i];
        const int32_t id = few.id[i];
        int64_t at = i;
        for (; at > 0 && best[at - 1] < v; --at) best[at] = best[at - 1], ids[at] = ids[at - 1];
        best[at] = v, ids[at] = id;
    }
    for (int64_t i = 0; i < few.count; ++i) best[i] = (float)((double)best[i] - normaliser);
}

}  // namespace
}  // namespace TW_NS
}  // namespace tw
#endif
