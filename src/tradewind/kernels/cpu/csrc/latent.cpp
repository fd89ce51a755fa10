// Attention over latents (MLA, DeepSeek-V2 2024): a page holds one vector of C + R numbers for a token, whatever the number of heads.
//
//      latent    c (C numbers, normed) | k_rope (R numbers, turned)         keys and values of head h are made of it:
//      key       W_k[h] c (N numbers)  | k_rope                             value   W_v[h] c (V numbers)
//
// Two forms of one sum, chosen for each row by which multiplies less (`naive_is_cheaper`, the same rule as in reference_mla.py):
//
//      absorbed  (q_nope W_k[h]) . c + q_rope . k_rope,  then W_v[h] (sum of p c)     all heads share the latent: it is read once
//      naive     q . key,  then sum of p value                                        keys and values are made once for all queries of a row
//
// Everything is one small product C = A B in registers. As in attention.cpp the keys of a row are cut into parts of 256 positions, a softmax
// over one part is computed on its own, and parts are merged in order: a result depends neither on neighbours nor on the number of threads,
// bit for bit. (It depends on the form, and so in its last bits on how long a piece of a prompt is.)
//
// A *line* is one (token, head) pair; a *tile* is neighbouring tokens of one row, all heads; a *run* is neighbouring tokens of absorbed rows.
#ifndef TW_LEVEL
#include "runtime.h"

namespace tw {
namespace {

constexpr int64_t PART = 256;       // keys whose softmax is computed at once: part of the result's definition
constexpr int64_t SUB = 64;         // keys that are transposed together
constexpr int64_t TILE_LINES = 64;  // lines of a tile, where a token has fewer
constexpr int64_t RUN_TOKENS = 64;  // tokens that meet a head's matrices together

struct Span {
    int32_t token, tokens, row;  // of a run the row means nothing
};

struct Job {
    const float* q;  // [T, H, N + R]
    const void* pages;
    int64_t format, page_tokens, heads, rank, rope, nope, value;
    const void *k_up, *v_up;  // [H, N, C] and [H, C, V]
    int64_t up_format;
    const int32_t *query_start, *lengths, *page_table;
    int64_t table_width, rows;
    float scale;
    float* out;               // [T, H, V]
    float *absorbed, *mixed;  // [T, H, C + R], [T, H, C]

    int64_t width() const { return rank + rope; }
    int64_t head() const { return nope + rope; }
    int64_t tokens(int64_t row) const { return query_start[row + 1] - query_start[row]; }
    const int32_t* table(int64_t row) const { return page_table + row * table_width; }
    // The last key that a token of the row sees.
    int64_t last(int64_t row, int64_t token) const { return lengths[row] - query_start[row + 1] + token; }

    bool naive_is_cheaper(int64_t row) const {
        const int64_t n = tokens(row), length = lengths[row];
        const int64_t pairs = n * length - n * (n - 1) / 2;  // of a query and a key that it sees
        return (length - n) * rank * (nope + value) < pairs * ((2 * rank + rope) - (nope + rope + value));
    }
};

// What a step consists of; every thread finds the same.
struct Work {
    Span *tiles, *runs, *rows;
    int64_t tile_count = 0, run_count = 0, row_count = 0, parts = 0, tile_tokens;

    Work(const Job& job, Span* room) : tiles(room) {
        tile_tokens = job.heads < TILE_LINES ? TILE_LINES / job.heads : 1;
        const int64_t total = job.query_start[job.rows];
        runs = tiles + total, rows = runs + total;
        for (int64_t row = 0; row < job.rows; ++row) {
            const int32_t begin = job.query_start[row], end = job.query_start[row + 1];
            if (begin == end) continue;
            if (job.naive_is_cheaper(row)) {
                rows[row_count++] = {begin, end - begin, (int32_t)row};
                continue;
            }
            const int64_t row_parts = (job.lengths[row] + PART - 1) / PART;
            if (row_parts > parts) parts = row_parts;
            for (int32_t token = begin; token < end; token += tile_tokens)
                tiles[tile_count++] = {token, (int32_t)(end - token < tile_tokens ? end - token : tile_tokens), (int32_t)row};
            for (int32_t token = begin; token < end;) {
                Span* run = run_count ? runs + run_count - 1 : nullptr;
                if (!run || run->token + run->tokens != token || run->tokens == RUN_TOKENS) runs[run_count++] = {token, 0, 0}, run = runs + run_count - 1;
                const int32_t room_left = RUN_TOKENS - run->tokens, more = end - token < room_left ? end - token : room_left;
                run->tokens += more, token += more;
            }
        }
    }
};

struct Phases {
    void (*store)(const Word* a, int64_t begin, int64_t end);
    // Queries of a run for one head, in the space of latents.
    void (*absorb)(const Job&, const Span& run, int64_t head);
    // All parts of a tile, to `mixed`.
    void (*whole)(const Job&, const Span& tile, Thread&);
    // One part only, left at `result`: for each line m, l, acc[C].
    void (*part)(const Job&, const Span& tile, int64_t part, float* result, Thread&);
    void (*merge)(const Job&, const Span& tile, const float* results, int64_t stride, int64_t count, Thread&);
    // What a run found, from the space of latents to that of values, for one head.
    void (*raise)(const Job&, const Span& run, int64_t head);
    // One row for one head with keys and values made.
    void (*naive)(const Job&, const Span& row, int64_t head, Thread&);
};

}  // namespace
}  // namespace tw

#define TW_SOURCE "latent.cpp"
#include "each_level.h"

namespace tw {
namespace {
Phases phases_of(const Thread& t, int64_t format, int64_t up_format) {
    return format == 0 ? TW_PICK(t, phases_f32)(up_format) : format == 1 ? TW_PICK(t, phases_f16)(up_format) : TW_PICK(t, phases_bf16)(up_format);
}
}  // namespace
}  // namespace tw

// q, latent, angles, angles' width, write_slots, pages, format, C + R, H, N + R, weight, C, eps, count
TW_OP(latent_store, 14) {
    tw::Thread::Range part = t.share(tw::live(a[13]));
    tw::phases_of(t, a[6].i, 0).store(a, part.begin, part.end);
}

// q, pages, format, page tokens, H, C, R, N, V, W_k, W_v, their format, query_start, lengths, page_table, its width, rows, scale, out,
// room for absorbed queries, room for mixed latents, room for parts, its bytes
TW_OP(latent_attention, 23) {
    using namespace tw;
    const Job job{ptr<float>(a[0]),  a[1].p,  a[2].i,  a[3].i, a[4].i, a[5].i, a[6].i, a[7].i, a[8].i, a[9].p, a[10].p, a[11].i, ptr<int32_t>(a[12]),
                  ptr<int32_t>(a[13]), ptr<int32_t>(a[14]), a[15].i, live(a[16]), (float)a[17].f, ptr<float>(a[18]), ptr<float>(a[19]), ptr<float>(a[20])};
    if (job.rows == 0) return;
    const int64_t total = job.query_start[job.rows];
    const Work work(job, static_cast<Span*>(t.scratch((3 * total + 1) * sizeof(Span), Thread::MORE)));
    const Phases phases = phases_of(t, job.format, job.up_format);

    t.chunks(work.run_count * job.heads, [&](int64_t item) { phases.absorb(job, work.runs[item % work.run_count], item / work.run_count); });
    t.barrier();

    // Few tiles with many keys: spread the parts over the threads, and merge what they leave.
    const int64_t stride = work.tile_tokens * job.heads * (job.rank + 2), naive = work.row_count * job.heads;
    const bool spread = t.count > 1 && work.parts > 1 && work.tile_count < 4 * t.count &&
                        work.tile_count * work.parts * stride * (int64_t)sizeof(float) <= a[22].i;
    float* results = ptr<float>(a[21]);
    t.chunks(naive + work.tile_count * (spread ? work.parts : 1), [&](int64_t item) {
        if (item < naive) return phases.naive(job, work.rows[item / job.heads], item % job.heads, t);
        item -= naive;
        if (spread) return phases.part(job, work.tiles[item / work.parts], item % work.parts, results + item * stride, t);
        phases.whole(job, work.tiles[work.tile_count - 1 - item], t);  // the longest of a prompt first
    }, 1);
    t.barrier();
    if (spread) {
        t.chunks(work.tile_count, [&](int64_t tile) {
            phases.merge(job, work.tiles[tile], results + tile * work.parts * stride, stride, work.parts, t);
        }, 2);
        t.barrier();
    }
    t.chunks(work.run_count * job.heads, [&](int64_t item) { phases.raise(job, work.runs[item % work.run_count], item / work.run_count); }, 3);
}

#else
#include "product.h"

namespace tw {
namespace TW_NS {
namespace {

// Two vectors, number by number in turn: the first or the second half of what comes out.
TW_INLINE Vec mingle_low(Vec a, Vec b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
#else
    return __builtin_shuffle(a, b, IVec{0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23});
#endif
}
TW_INLINE Vec mingle_high(Vec a, Vec b) {
#if defined(__clang__) || __GNUC__ >= 12
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#else
    return __builtin_shuffle(a, b, IVec{8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31});
#endif
}
// Sixteen keys of a page, transposed: from[key][d], `width` apart -> to[d][key], `ld` apart. Each round of mingling turns the eight bits of
// (key, d) by one place; after four they have changed sides.
template <class Format>
void transpose(const typename Format::Stored* from, int64_t width, float* to, int64_t ld) {
    for (int64_t d = 0; d < width; d += W) {
        Vec x[W], y[W];
        for (int i = 0; i < W; ++i) x[i] = Format::load16(from + i * width + d);
        for (int round = 0; round < 4; ++round) {
            for (int i = 0; i < W / 2; ++i) y[2 * i] = mingle_low(x[i], x[i + 8]), y[2 * i + 1] = mingle_high(x[i], x[i + 8]);
            for (int i = 0; i < W; ++i) x[i] = y[i];
        }
        for (int i = 0; i < W; ++i) store(to + (d + i) * ld, x[i]);
    }
}

template <class Format>
TW_INLINE const typename Format::Stored* latent_at(const Job& job, const int32_t* table, int64_t position) {
    const int64_t slot = (int64_t)table[position / job.page_tokens] * job.page_tokens + position % job.page_tokens;
    return static_cast<const typename Format::Stored*>(job.pages) + slot * job.width();
}
// Up to SUB keys from `first` on, transposed: [C + R][SUB]. What lies behind the row's end is whatever the page holds there.
template <class Format>
void take_keys(const Job& job, const int32_t* table, int64_t first, int64_t count, float* to) {
    for (int64_t key = 0; key < count; key += W) transpose<Format>(latent_at<Format>(job, table, first + key), job.width(), to + key, SUB);
}

// Scores of the keys 0 .. keys - 1 of a part -> weights relative to the part's maximum; 0 for keys behind the last that the line sees.
void softmax(float* s, int64_t keys, int64_t last, float factor, float& m, float& l) {
    const int64_t padded = (keys + W - 1) / W * W;
    m = l = 0;
    if (last < 0) {
        for (int64_t i = 0; i < padded; i += W) store(s + i, splat(0));
        return;
    }
    const Vec nothing = splat(-__builtin_inff()), by = splat(factor);
    Vec most = nothing;
    for (int64_t i = 0; i < padded; i += W) {
        const Vec x = i > last ? nothing : select(iota() > splat_int((int32_t)(last - i)), nothing, load(s + i) * by);
        store(s + i, x);
        most = larger(x, most);
    }
    float peak = largest(most);
    if (peak == -__builtin_inff()) peak = 0;  // only NaN: they stay NaN
    const Vec shift = splat(peak);
    Vec total{};
    for (int64_t i = 0; i < padded; i += W) {
        const Vec p = i > last ? splat(0) : exp2(load(s + i) - shift);
        const Vec seen = i > last ? p : select(iota() > splat_int((int32_t)(last - i)), splat(0), p);
        total += seen;
        store(s + i, seen);
    }
    m = peak, l = sum(total);
}
// (m, l, acc) += (new_m, new_l, new_acc); l is 0 only where nothing was seen.
void add_part(float& m, float& l, float* acc, float new_m, float new_l, const float* new_acc, int64_t size) {
    if (new_l == 0) return;
    if (l == 0) {
        for (int64_t d = 0; d < size; d += W) store(acc + d, load(new_acc + d));
        m = new_m, l = new_l;
        return;
    }
    const float peak = m > new_m ? m : new_m;
    const Vec powers = exp2(Vec{m - peak, new_m - peak});
    const Vec old_factor = splat(powers[0]), new_factor = splat(powers[1]);
    for (int64_t d = 0; d < size; d += W) store(acc + d, fma(load(acc + d), old_factor, load(new_acc + d) * new_factor));
    l = l * powers[0] + new_l * powers[1];
    m = peak;
}
void divide(float* acc, float l, int64_t size) {
    const Vec by = splat(l == 0 ? 0.f : 1.f / l);
    for (int64_t d = 0; d < size; d += W) store(acc + d, l == 0 ? splat(0) : load(acc + d) * by);
}
TW_INLINE float factor_of(const Job& job) { return job.scale * 1.44269504f; }  // 2^x is the cheaper exponential

// ------------------------------------------------------------------------------------------------------------------------- absorbed

template <class Up>
void absorb(const Job& job, const Span& run, int64_t head) {
    const int64_t from = job.heads * job.head(), to = job.heads * job.width();
    const float* q = job.q + run.token * from + head * job.head();
    float* out = job.absorbed + run.token * to + head * job.width();
    const auto* up = static_cast<const typename Up::Stored*>(job.k_up) + head * job.nope * job.rank;
    product<F32, Up, false>(run.tokens, job.rank, job.nope, q, from, up, job.rank, out, to);
    for (int64_t i = 0; i < run.tokens; ++i)
        __builtin_memcpy(out + i * to + job.rank, q + i * from + job.nope, job.rope * sizeof(float));
}

template <class Up>
void raise(const Job& job, const Span& run, int64_t head) {
    const int64_t from = job.heads * job.rank, to = job.heads * job.value;
    const auto* up = static_cast<const typename Up::Stored*>(job.v_up) + head * job.rank * job.value;
    product<F32, Up, false>(run.tokens, job.value, job.rank, job.mixed + run.token * from + head * job.rank, from, up, job.value,
                            job.out + run.token * to + head * job.value, to);
}

struct TileRoom {
    int64_t lines;
    float *keys, *score, *part_m, *part_l, *m, *l, *part_acc;

    TileRoom(const Job& job, const Span& tile, Thread& thread) : lines(tile.tokens * job.heads) {
        const int64_t padded = (lines + W - 1) / W * W;
        float* at = static_cast<float*>(thread.scratch((job.width() * SUB + lines * PART + 4 * padded + lines * job.rank) * sizeof(float)));
        auto take = [&](int64_t n) { return (at += n) - n; };
        keys = take(job.width() * SUB), score = take(lines * PART), part_acc = take(lines * job.rank);
        part_m = take(padded), part_l = take(padded), m = take(padded), l = take(padded);
    }
};

template <class Format>
void tile_part(const Job& job, const Span& tile, int64_t part, TileRoom& room) {
    const int64_t base = part * PART, high = job.last(tile.row, tile.token + tile.tokens - 1);
    const int64_t keys = lesser(high - base + 1, PART), width = job.width(), lines = room.lines;
    for (int64_t line = 0; line < lines; ++line) room.part_m[line] = room.part_l[line] = 0;
    if (keys <= 0) return;
    const int32_t* table = job.table(tile.row);
    const float* q = job.absorbed + tile.token * job.heads * width;
    for (int64_t first = 0; first < keys; first += SUB) {
        const int64_t count = lesser(SUB, keys - first);
        take_keys<Format>(job, table, base + first, count, room.keys);
        product<F32, F32, false>(lines, (count + W - 1) / W * W, width, q, width, room.keys, SUB, room.score + first, PART);
    }
    for (int64_t line = 0; line < lines; ++line)
        softmax(room.score + line * PART, keys, job.last(tile.row, tile.token + line / job.heads) - base, factor_of(job), room.part_m[line],
                room.part_l[line]);
    __builtin_memset(room.part_acc, 0, lines * job.rank * sizeof(float));
    for (int64_t first = 0; first < keys;) {
        const int64_t count = lesser(job.page_tokens - (base + first) % job.page_tokens, keys - first);
        product<F32, Format, true>(lines, job.rank, count, room.score + first, PART, latent_at<Format>(job, table, base + first), width,
                                   room.part_acc, job.rank);
        first += count;
    }
}

template <class Format>
void whole(const Job& job, const Span& tile, Thread& thread) {
    TileRoom room(job, tile, thread);
    float* out = job.mixed + tile.token * job.heads * job.rank;
    for (int64_t line = 0; line < room.lines; ++line) room.m[line] = room.l[line] = 0;
    const int64_t parts = job.last(tile.row, tile.token + tile.tokens - 1) / PART + 1;
    for (int64_t part = 0; part < parts; ++part) {
        tile_part<Format>(job, tile, part, room);
        for (int64_t line = 0; line < room.lines; ++line)
            add_part(room.m[line], room.l[line], out + line * job.rank, room.part_m[line], room.part_l[line], room.part_acc + line * job.rank, job.rank);
    }
    for (int64_t line = 0; line < room.lines; ++line) divide(out + line * job.rank, room.l[line], job.rank);
}

template <class Format>
void one_part(const Job& job, const Span& tile, int64_t part, float* result, Thread& thread) {
    TileRoom room(job, tile, thread);
    tile_part<Format>(job, tile, part, room);
    for (int64_t line = 0; line < room.lines; ++line, result += job.rank + 2) {
        result[0] = room.part_m[line], result[1] = room.part_l[line];
        if (room.part_l[line] != 0) __builtin_memcpy(result + 2, room.part_acc + line * job.rank, job.rank * sizeof(float));
    }
}

void merge(const Job& job, const Span& tile, const float* results, int64_t stride, int64_t count, Thread&) {
    float* out = job.mixed + tile.token * job.heads * job.rank;
    for (int64_t line = 0; line < tile.tokens * job.heads; ++line, out += job.rank) {
        float m = 0, l = 0;
        for (int64_t part = 0; part < count; ++part) {
            const float* at = results + part * stride + line * (job.rank + 2);
            add_part(m, l, out, at[0], at[1], at + 2, job.rank);
        }
        divide(out, l, job.rank);
    }
}

// ---------------------------------------------------------------------------------------------------------------------------- naive

template <class Format, class Up>
void naive(const Job& job, const Span& row, int64_t head, Thread& thread) {
    constexpr int64_t QUERIES = 48;
    const int64_t dim = job.head(), width = job.width(), value = job.value, heads = job.heads;
    float* at = static_cast<float*>(
        thread.scratch((width * SUB + dim * PART + PART * value + QUERIES * (PART + value) + 2 * row.tokens) * sizeof(float)));
    auto take = [&](int64_t n) { return (at += n) - n; };
    float *latents = take(width * SUB), *keys = take(dim * PART), *values = take(PART * value), *score = take(QUERIES * PART),
          *part_acc = take(QUERIES * value), *m = take(row.tokens), *l = take(row.tokens);
    for (int64_t i = 0; i < row.tokens; ++i) m[i] = l[i] = 0;
    const auto* k_up = static_cast<const typename Up::Stored*>(job.k_up) + head * job.nope * job.rank;
    const auto* v_up = static_cast<const typename Up::Stored*>(job.v_up) + head * job.rank * value;
    const int32_t* table = job.table(row.row);
    const int64_t length = job.lengths[row.row];
    for (int64_t base = 0; base < length; base += PART) {
        const int64_t count = lesser(PART, length - base);
        for (int64_t first = 0; first < count; first += SUB) {
            const int64_t some = lesser(SUB, count - first), padded = (some + W - 1) / W * W;
            take_keys<Format>(job, table, base + first, some, latents);
            product<Up, F32, false>(job.nope, padded, job.rank, k_up, job.rank, latents, SUB, keys + first, PART);
            for (int64_t d = 0; d < job.rope; ++d)
                __builtin_memcpy(keys + (job.nope + d) * PART + first, latents + (job.rank + d) * SUB, padded * sizeof(float));
        }
        for (int64_t first = 0; first < count;) {
            const int64_t some = lesser(job.page_tokens - (base + first) % job.page_tokens, count - first);
            product<Format, Up, false>(some, value, job.rank, latent_at<Format>(job, table, base + first), width, v_up, value,
                                       values + first * value, value);
            first += some;
        }
        // Queries that see nothing of this part stand in front.
        const int64_t begin = greater(0, base - job.last(row.row, row.token));
        for (int64_t query = begin; query < row.tokens; query += QUERIES) {
            const int64_t lines = lesser(QUERIES, row.tokens - query), token = row.token + query;
            const int64_t seen = lesser(count, job.last(row.row, token + lines - 1) - base + 1);
            product<F32, F32, false>(lines, (seen + W - 1) / W * W, dim, job.q + (token * heads + head) * dim, heads * dim, keys, PART, score, PART);
            float part_m[QUERIES], part_l[QUERIES];
            for (int64_t i = 0; i < lines; ++i)
                softmax(score + i * PART, seen, job.last(row.row, token + i) - base, factor_of(job), part_m[i], part_l[i]);
            product<F32, F32, false>(lines, value, seen, score, PART, values, value, part_acc, value);
            for (int64_t i = 0; i < lines; ++i)
                add_part(m[query + i], l[query + i], job.out + ((token + i) * heads + head) * value, part_m[i], part_l[i], part_acc + i * value, value);
        }
    }
    for (int64_t i = 0; i < row.tokens; ++i) divide(job.out + ((row.token + i) * heads + head) * value, l[i], value);
}

// ---------------------------------------------------------------------------------------------------------------------------- store

// Turns the pairs (2i, 2i + 1), as this family's checkpoints have them, in place.
void turn(float* x, const float* angles, int64_t half) {
    for (int64_t i = 0; i < half; ++i) {
        const float first = x[2 * i], second = x[2 * i + 1], c = angles[i], s = angles[half + i];
        x[2 * i] = first * c - second * s;
        x[2 * i + 1] = second * c + first * s;
    }
}
template <class Format>
void latent_store(const Word* a, int64_t begin, int64_t end) {
    const int64_t rope = a[3].i, width = a[7].i, heads = a[8].i, dim = a[9].i, rank = a[11].i;
    const float *weight = ptr<float>(a[10]), eps = (float)a[12].f;
    alignas(64) float turned[1024];
    for (int64_t t = begin; t < end; ++t) {
        const float *angles = ptr<float>(a[2]) + t * rope, *latent = ptr<float>(a[1]) + t * width;
        float* q = ptr<float>(a[0]) + t * heads * dim;
        for (int64_t h = 0; h < heads; ++h) turn(q + h * dim + dim - rope, angles, rope / 2);
        Vec squares{};
        for (int64_t i = 0; i < rank; i += W) squares = fma(load(latent + i), load(latent + i), squares);
        const float inverse = 1.f / __builtin_sqrtf(sum(squares) / (float)rank + eps);
        __builtin_memcpy(turned, latent + rank, rope * sizeof(float));
        turn(turned, angles, rope / 2);
        auto* to = ptr<typename Format::Stored>(a[5]) + (int64_t)ptr<int32_t>(a[4])[t] * width;
        for (int64_t i = 0; i < rank; ++i) to[i] = Format::put(latent[i] * inverse * weight[i]);
        for (int64_t i = 0; i < rope; ++i) to[rank + i] = Format::put(turned[i]);
    }
}

template <class Format>
Phases phases(int64_t up_format) {
    const bool exact = up_format == 0;
    return {latent_store<Format>,
            exact ? absorb<F32> : absorb<BF16>,
            whole<Format>,
            one_part<Format>,
            merge,
            exact ? raise<F32> : raise<BF16>,
            exact ? naive<Format, F32> : naive<Format, BF16>};
}
Phases phases_f32(int64_t up_format) { return phases<F32>(up_format); }
Phases phases_f16(int64_t up_format) { return phases<F16>(up_format); }
Phases phases_bf16(int64_t up_format) { return phases<BF16>(up_format); }

}  // namespace
}  // namespace TW_NS
}  // namespace tw
#endif
