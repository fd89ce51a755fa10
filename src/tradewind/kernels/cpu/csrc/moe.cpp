// Mixtures of experts: `route` (which experts a token is sent to) and `experts` (their answers, weighted and summed).
//
// Knows: sorting by expert, and which strips of which expert a thread multiplies. Refuses to know: instruction sets and packed layouts
// (gemm.h does the multiplying), where logits come from.
//
// A pair t K + k is "token t at its k-th expert". All pairs are sorted by expert, in order of tokens within one, so that an expert's rows lie
// together and nobody's are dropped:
//
//     order     pairs of expert 0 | pairs of expert 3 | ...      experts without a pair are not there: their weights are not read
//     x         the pairs' rows, prepared for the matmul         [pairs, E]
//     inner     activation(gate) * up                            [pairs, F]; the weight comes into both where it is the input's
//     out[t]    += weight * down, expert by expert upwards: one fixed order for a token, whatever its neighbours
//
// Work is cut into groups of strips (columns of the result), never by expert, so that a hot expert costs every thread the same.
#include "gemm.h"

#include <algorithm>
#include <cmath>

namespace tw {

namespace {

// ---------------------------------------------------------------------------------------------------------------- routing

constexpr int64_t MOST_EXPERTS = 1024;

struct Routing {
    int64_t experts, top_k;
    bool sigmoid, normalise;
    float scale;
    int64_t groups, groups_kept, group_top;
};

// Index of the largest of n values that `taken` leaves, the lowest among equals; always a valid one, also where values are NaN.
int64_t best_left(const float* values, const bool* taken, int64_t n) {
    int64_t best = -1;
    for (int64_t i = 0; i < n; ++i)
        if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    return best;
}

void route_token(const float* logits, const float* bias, const Routing& r, int32_t* ids, float* weights) {
    float score[MOST_EXPERTS], deciding[MOST_EXPERTS];
    bool taken[MOST_EXPERTS] = {};
    if (r.sigmoid) {
        for (int64_t i = 0; i < r.experts; ++i) score[i] = 1.f / (1.f + std::exp(-logits[i]));
    } else {
        float top = logits[0], sum = 0;
        for (int64_t i = 1; i < r.experts; ++i) top = std::max(top, logits[i]);
        for (int64_t i = 0; i < r.experts; ++i) sum += score[i] = std::exp(logits[i] - top);
        for (int64_t i = 0; i < r.experts; ++i) score[i] /= sum;
    }
    for (int64_t i = 0; i < r.experts; ++i) deciding[i] = bias ? score[i] + bias[i] : score[i];
    if (r.groups > 1) {
        const int64_t size = r.experts / r.groups;
        float group[MOST_EXPERTS];
        bool kept[MOST_EXPERTS] = {}, used[MOST_EXPERTS] = {};
        for (int64_t g = 0; g < r.groups; ++g) {
            group[g] = 0;
            for (int64_t n = 0; n < std::min(r.group_top, size); ++n) {
                const int64_t best = g * size + best_left(deciding + g * size, used + g * size, size);
                used[best] = true;
                group[g] += deciding[best];
            }
        }
        for (int64_t n = 0; n < r.groups_kept; ++n) kept[best_left(group, kept, r.groups)] = true;
        for (int64_t i = 0; i < r.experts; ++i) taken[i] = !kept[i / size];
    }
    float sum = 0;
    for (int64_t k = 0; k < r.top_k; ++k) {
        const int64_t best = best_left(deciding, taken, r.experts);
        taken[best] = true;
        ids[k] = int32_t(best);
        weights[k] = score[best];
        sum += score[best];
    }
    for (int64_t k = 0; k < r.top_k; ++k) weights[k] = (r.normalise ? weights[k] / (sum + 1e-20f) : weights[k]) * r.scale;
}

// ---------------------------------------------------------------------------------------------------------------- experts

struct Call {
    const float* x;
    int64_t tokens, chosen, experts;
    const int32_t* ids;
    const float* weights;
    const Packed* const* gate_up;
    const Packed* const* down;
    const float *gate_up_bias, *down_bias;
    int64_t activation;
    bool weigh_input;  // weights are factors on what gate and up make of x, and not on the answers
    int64_t terms;
    float* out;
    uint8_t* scratch;
};

// Where things lie in the scratch; the same for every thread, from the live number of pairs.
struct Places {
    int32_t *start, *active, *order;  // [experts + 1]: of the active ones, first pairs; their ids, and how many at [experts]; [pairs]
    uint8_t *x, *middle;              // prepared rows for gate_up and for down
    float* inner;
    int64_t bytes;
};

Places places(uint8_t* scratch, int64_t pairs, int64_t experts, const Packed& gate_up, const Packed& down, int64_t terms) {
    int64_t at = 0;
    auto take = [&](int64_t bytes) {
        uint8_t* place = scratch + at;
        at += to_line(bytes);
        return place;
    };
    auto row_bytes = [&](const Packed& p) {
        const int64_t prepared = prepared_stride(p);
        return prepared ? prepared * (p.layout == LAYOUT_QUANT ? terms : 1) : p.k * int64_t(sizeof(float));
    };
    Places to;
    to.start = reinterpret_cast<int32_t*>(take(4 * (experts + 1)));
    to.active = reinterpret_cast<int32_t*>(take(4 * (experts + 1)));
    to.order = reinterpret_cast<int32_t*>(take(4 * pairs));
    to.x = take(pairs * row_bytes(gate_up));
    to.inner = reinterpret_cast<float*>(take(pairs * down.k * int64_t(sizeof(float))));
    to.middle = prepared_stride(down) ? take(pairs * row_bytes(down)) : reinterpret_cast<uint8_t*>(to.inner);
    to.bytes = at;
    return to;
}

// A counting sort; then experts without pairs are left out.
void sort_pairs(const Call& c, const Places& to) {
    const int64_t pairs = c.tokens * c.chosen;
    std::fill(to.start, to.start + c.experts + 1, 0);
    for (int64_t p = 0; p < pairs; ++p) ++to.start[c.ids[p]];
    int32_t begin = 0;
    for (int64_t e = 0; e < c.experts; ++e) {
        const int32_t mine = to.start[e];
        to.start[e] = begin;
        begin += mine;
    }
    for (int64_t p = 0; p < pairs; ++p) to.order[to.start[c.ids[p]]++] = int32_t(p);
    // start[e] is now where e's pairs end, which is where the next active one's begin.
    int32_t active = 0, before = 0;
    for (int64_t e = 0; e < c.experts; ++e)
        if (to.start[e] != before) {
            to.active[active++] = int32_t(e);
            const int32_t end = to.start[e];
            to.start[active - 1] = before;
            before = end;
        }
    to.start[active] = before;
    to.active[c.experts] = active;
}

// Strips in groups: few, so that rows are read again seldom; enough, so that threads are equally busy.
struct Groups {
    int64_t strips, size, count;
    Groups(const Packed& p, const Thread& t) : strips((p.blocks + 1) / 2), size(std::max<int64_t>(1, strips / (4 * t.count))) {
        count = (strips + size - 1) / size;
    }
};

// Multiplies the strips of a group with rows [first, last) of x, in bands and tiles; done(strip, row, rows, acc) takes the sums.
template <class F>
void group_sums(const Rows& rows, const Packed& p, const Groups& groups, int64_t group, const uint8_t* x, int64_t first, int64_t last, F&& done) {
    const int64_t begin = group * groups.size, end = std::min(begin + groups.size, groups.strips);
    const int64_t band = std::max<int64_t>(rows.tile_rows, BAND_BYTES / rows.stride / rows.tile_rows * rows.tile_rows);
    alignas(64) float acc[MAX_ROWS * STRIP];
    for (int64_t from = first; from < last; from += band) {
        const int64_t until = std::min(from + band, last), tiles = (until - from + rows.tile_rows - 1) / rows.tile_rows;
        for (int64_t strip = begin; strip < end; ++strip) {
            Strip w = strip_of(p, strip, strip + 1 < end ? strip + 1 : -1);
            for (int64_t i = 0; i < tiles; ++i) {
                const int64_t row = from + (until - from) * i / tiles, after = from + (until - from) * (i + 1) / tiles;
                strip_sums(rows, p, w, x + row * rows.stride, int(after - row), acc);
                w.next = nullptr;
                done(strip, row, int(after - row), acc);
            }
        }
    }
}

void run_experts(const Call& c, Thread& t) {
    if (c.tokens <= 0) return;
    const Packed &first = *c.gate_up[0], &second = *c.down[0];  // every expert's are like these
    const int64_t pairs = c.tokens * c.chosen, hidden = first.k, inner = first.n / 2, outputs = second.n;
    const Places to = places(c.scratch, pairs, c.experts, first, second, c.terms);
    if (t.id == 0) sort_pairs(c, to);
    t.barrier();
    const int64_t active = to.active[c.experts];

    const Rows rows = rows_for(first, t.isa, c.terms, hidden);
    Thread::Range part = t.share(pairs);
    for (int64_t p = part.begin; p < part.end; ++p) {
        const float* x = c.x + to.order[p] / c.chosen * hidden;
        if (rows.path.prepare) prepare_row(rows, first, x, to.x + p * rows.stride);
        else std::memcpy(to.x + p * rows.stride, x, hidden * sizeof(float));
    }
    t.barrier();

    const Groups wide(first, t);
    share_items(t, wide.count * active, [&](int64_t item, int64_t) {
        const int64_t which = item % active, expert = to.active[which];
        const Packed& p = *c.gate_up[expert];
        const float* bias = c.gate_up_bias ? c.gate_up_bias + expert * 2 * inner : nullptr;
        group_sums(rows, p, wide, item / active, to.x, to.start[which], to.start[which + 1],
                   [&](int64_t strip, int64_t row, int count, float* acc) {
                       if (c.weigh_input)
                           for (int m = 0; m < count; ++m)
                               for (int64_t r = 0; r < STRIP; ++r) acc[m * STRIP + r] *= c.weights[to.order[row + m]];
                       const int64_t column = strip * 16;
                       const int live = int(std::min<int64_t>(16, inner - column));
                       Store store{to.inner + row * inner + column, inner, {nullptr, nullptr}, {live, live}, c.activation};
                       if (bias) store.bias[0] = bias + column, store.bias[1] = bias + inner + column;
                       rows.path.finish_gated(acc, count, store);
                   });
    });
    t.barrier();

    const Rows middle = rows_for(second, t.isa, c.terms, inner);
    if (middle.path.prepare) {
        for (int64_t p = part.begin; p < part.end; ++p) prepare_row(middle, second, to.inner + p * inner, to.middle + p * middle.stride);
        t.barrier();
    }

    const Groups narrow(second, t);
    share_items(
        t, narrow.count,
        [&](int64_t group, int64_t) {
            const int64_t begin = group * narrow.size * STRIP, end = std::min(begin + narrow.size * STRIP, outputs);
            for (int64_t token = 0; token < c.tokens; ++token) std::fill(c.out + token * outputs + begin, c.out + token * outputs + end, 0.f);
            for (int64_t which = 0; which < active; ++which) {
                const int64_t expert = to.active[which];
                const float* bias = c.down_bias ? c.down_bias + expert * outputs : nullptr;
                group_sums(middle, *c.down[expert], narrow, group, to.middle, to.start[which], to.start[which + 1],
                           [&](int64_t strip, int64_t row, int count, const float* acc) {
                               const int64_t column = strip * STRIP, live = std::min<int64_t>(STRIP, outputs - column);
                               for (int m = 0; m < count; ++m) {
                                   const int32_t pair = to.order[row + m];
                                   const float weight = c.weigh_input ? 1.f : c.weights[pair];
                                   float* out = c.out + pair / c.chosen * outputs + column;
                                   if (bias)
                                       for (int64_t r = 0; r < live; ++r) out[r] += weight * (acc[m * STRIP + r] + bias[column + r]);
                                   else
                                       for (int64_t r = 0; r < live; ++r) out[r] += weight * acc[m * STRIP + r];
                               }
                           });
            }
        },
        1);
}

}  // namespace

// logits, experts, bias or null, ids, weights, top k, sigmoid, normalise, scale, groups, groups kept, top of a group, count
TW_OP(route, 13) {
    const Routing r{a[1].i, a[5].i, a[6].i != 0, a[7].i != 0, float(a[8].f), a[9].i, a[10].i, a[11].i};
    const Thread::Range part = t.share(live(a[12]));
    for (int64_t i = part.begin; i < part.end; ++i)
        route_token(ptr<float>(a[0]) + i * r.experts, ptr<float>(a[2]), r, ptr<int32_t>(a[3]) + i * r.top_k, ptr<float>(a[4]) + i * r.top_k);
}

// x, ids, weights, experts of a token, experts, gate_up and down (addresses by expert), their biases or null, activation, whether the input
// is weighed, out, scratch, terms, count
TW_OP(experts, 15) {
    run_experts({ptr<float>(a[0]), live(a[14]), a[3].i, a[4].i, ptr<int32_t>(a[1]), ptr<float>(a[2]), ptr<const Packed*>(a[5]),
                 ptr<const Packed*>(a[6]), ptr<float>(a[7]), ptr<float>(a[8]), a[9].i, a[10].i != 0, a[13].i, ptr<float>(a[11]),
                 ptr<uint8_t>(a[12])},
                t);
}

}  // namespace tw

extern "C" {

// Bytes of scratch that `experts` needs for `pairs` pairs of a token and an expert.
int64_t tw_experts_scratch(const void* gate_up, const void* down, int64_t pairs, int64_t experts, int64_t terms) {
    return tw::places(nullptr, pairs, experts, *static_cast<const tw::Packed*>(gate_up), *static_cast<const tw::Packed*>(down), terms).bytes;
}
}
