// Attention (causal, or of every token to all) over paged keys and values, for rows of any length: one token of a decode step or a whole prompt.
//
// One order of operations for everyone. The keys of a row are cut into parts of 256 positions, counted from position 0. A query's softmax
// over one part is computed on its own (maximum, sum, weighted values), and parts are merged in order, first to last. Every query does
// exactly these float operations, whether it is alone, in a tile with neighbours, or spread over threads by parts; so its result depends
// neither on batch mates nor on chunk sizes nor on the number of threads, bit for bit.
//
//      keys      0 ....... 255 | 256 ....... 511 | 512 ... 560
//      part            0       |        1        |     2            (m, l, acc) each
//      result     ((part 0 + part 1) + part 2) / l
//
// Words used below: a *line* is one (token, query head) pair; a *tile* is some neighbouring tokens whose lines, for one kv head, are
// computed together, so that a key that was loaded and widened once serves them all. Rows of one token that share pages (a common prefix)
// share a tile, too.
#ifndef TW_LEVEL
#include "runtime.h"

#include <type_traits>

namespace tw {
namespace {

constexpr int64_t BLOCK = 16;       // keys in a vector
constexpr int64_t PART = 256;       // keys whose softmax is computed at once: part of the result's definition
constexpr int64_t TILE_LINES = 48;  // more lines save conversions, fewer keep their scores in the nearest cache

struct Tile {
    int32_t token, tokens;  // of the step
    int32_t row, rows;      // one row, or several rows of one token each
};

struct Job {
    const float* q;
    const void *k, *v;
    int64_t format, page_tokens, kv_heads, heads, dim;
    const int32_t *query_start, *lengths, *page_table;
    int64_t table_width, rows;
    float scale, softcap;
    int64_t window;  // 0: none; under 0: not causal
    bool chunked;    // windows restart at multiples of their size
    const float* sinks;
    float* out;

    int64_t group() const { return heads / kv_heads; }
    const int32_t* pages(int64_t row) const { return page_table + row * table_width; }
    // The first position that a position sees.
    int64_t sight(int64_t position) const {
        if (window <= 0) return 0;
        const int64_t begin = chunked ? position - position % window : position - window + 1;
        return begin > 0 ? begin : 0;
    }
};

// Whether two rows have the same pages wherever a part looks.
bool same_pages(const Job& job, int64_t a, int64_t b, int64_t part) {
    int64_t begin = part * PART / job.page_tokens, end = ((part + 1) * PART + job.page_tokens - 1) / job.page_tokens;
    if (end > job.table_width) end = job.table_width;
    return begin < end && std::memcmp(job.pages(a) + begin, job.pages(b) + begin, (end - begin) * sizeof(int32_t)) == 0;
}

// Cuts the step into tiles; every thread finds the same ones. `tiles` has room for one per token.
int64_t make_tiles(const Job& job, int threads, Tile* tiles) {
    const int64_t most = job.group() < TILE_LINES ? TILE_LINES / job.group() : 1;
    int64_t lone = 0;
    for (int64_t row = 0; row < job.rows; ++row) lone += job.query_start[row + 1] - job.query_start[row] == 1;
    // Rows may share a tile as long as enough tiles are left for the threads.
    int64_t most_rows = lone * job.kv_heads / (4 * threads);
    if (most_rows > most) most_rows = most;
    int64_t count = 0;
    for (int64_t row = 0; row < job.rows; ++row) {
        const int64_t begin = job.query_start[row], end = job.query_start[row + 1];
        if (end - begin == 1 && count > 0) {
            Tile& last = tiles[count - 1];
            if (last.tokens == last.rows && last.rows < most_rows && job.lengths[row] >= PART && job.lengths[row - 1] >= PART &&
                same_pages(job, row - 1, row, 0)) {
                ++last.tokens;
                ++last.rows;
                continue;
            }
        }
        for (int64_t token = begin; token < end; token += most)
            tiles[count++] = {(int32_t)token, (int32_t)(end - token < most ? end - token : most), (int32_t)row, 1};
    }
    return count;
}

// What a thread will probably do next, so that its first keys can be asked for.
struct Upcoming {
    const int32_t* pages;  // null: unknown
    int64_t g, first, last;
};

struct Phases {
    // All parts of a tile for one kv head, from queries to output.
    void (*whole)(const Job&, const Tile&, int64_t g, Upcoming, Thread&);
    // One part only, left at `part_result`: for each line m, l, acc[D].
    void (*part)(const Job&, const Tile&, int64_t g, int64_t part, float* part_result, Thread&);
    // Merges parts 0 .. count - 1 of a tile, `stride` floats apart, and writes the output.
    void (*merge)(const Job&, const Tile&, int64_t g, const float* part_results, int64_t stride, int64_t count, Thread&);
};

}  // namespace
}  // namespace tw

#define TW_SOURCE "attention.cpp"
#include "each_level.h"

// q, k, v, format, page tokens, G, H, D, query_start, lengths, page_table, its width, rows, scale, window (0: none, -1: not causal, every
// token sees all keys of its row), whether windows restart at multiples of their size, softcap (0: none), sinks (0: none), out, scratch for
// parts, its bytes
TW_OP(attention, 21) {
    using namespace tw;
    Job job{ptr<float>(a[0]), a[1].p, a[2].p, a[3].i, a[4].i, a[5].i, a[6].i, a[7].i, ptr<int32_t>(a[8]), ptr<int32_t>(a[9]),
            ptr<int32_t>(a[10]), a[11].i, live(a[12]), (float)a[13].f, (float)a[16].f, a[14].i, a[15].i != 0, ptr<float>(a[17]), ptr<float>(a[18])};
    if (job.rows == 0) return;
    const int64_t tokens = job.query_start[job.rows] - job.query_start[0];
    Tile* tiles = static_cast<Tile*>(t.scratch((tokens + 1) * sizeof(Tile), Thread::MORE));
    const int64_t count = make_tiles(job, t.count, tiles);
    const Phases phases = job.format == 0   ? TW_PICK(t, phases_f32)()
                          : job.format == 1 ? TW_PICK(t, phases_f16)()
                                            : TW_PICK(t, phases_bf16)();

    // Few tiles with many keys: spread the parts over the threads, and merge what they leave.
    const int64_t items = count * job.kv_heads;
    if (t.count > 1 && items < 4 * t.count) {
        int64_t parts = 0, lines = 0;
        for (int64_t row = 0; row < job.rows; ++row) {
            int64_t row_parts = (job.lengths[row] + PART - 1) / PART;
            if (row_parts > parts) parts = row_parts;
        }
        for (int64_t i = 0; i < count; ++i)
            if (tiles[i].tokens * job.group() > lines) lines = tiles[i].tokens * job.group();
        const int64_t stride = lines * (job.dim + 2);
        if (parts > 1 && items * parts * stride * (int64_t)sizeof(float) <= a[20].i) {
            float* results = ptr<float>(a[19]);
            t.chunks(items * parts, [&](int64_t item) {
                const int64_t which = item / parts;
                phases.part(job, tiles[which % count], which / count, item % parts, results + item * stride, t);
            });
            t.barrier();
            t.chunks(items, [&](int64_t which) {
                phases.merge(job, tiles[which % count], which / count, results + which * parts * stride, stride, parts, t);
            }, 1);
            return;
        }
    }
    // One kv head after the other, so that rows that share pages find them in the cache; the longest tiles of a prompt first.
    auto tile_of = [&](int64_t item) -> const Tile& { return tiles[count - 1 - item % count]; };
    t.chunks(items, [&](int64_t item) {
        Upcoming upcoming{};
        if (const int64_t then = item + t.count; then < items) {
            const int64_t row = tile_of(then).row, last = job.lengths[row] - 1;
            const int64_t first = job.sight(last + 1 - job.query_start[row + 1] + tile_of(then).token);
            upcoming = {job.pages(row), then / count, first / BLOCK * BLOCK, last};
        }
        phases.whole(job, tile_of(item), item / count, upcoming, t);
    });
}

#else
namespace tw {
namespace TW_NS {
namespace {

// Register tiles: lines x blocks of keys for the scores, lines x vectors of D for the values.
#if TW_LEVEL == 2
constexpr int LINES = 6, BLOCKS = 4, VECS = 4;
#elif TW_LEVEL == 1
constexpr int LINES = 6, BLOCKS = 1, VECS = 1;
#else
constexpr int LINES = 2, BLOCKS = 1, VECS = 1;
#endif
constexpr int64_t SPAN = 4;  // blocks that are widened together

// While a span of blocks is computed, the memory of the next one is asked for, in step: pages are scattered, and the hardware guesses only
// within one. `next` of a block is where to ask, or null.
template <class Stored>
TW_INLINE void ask(const Stored* next, int64_t at) {
    __builtin_prefetch(reinterpret_cast<const char*>(next) + at * (int64_t)sizeof(Stored), 0, 2);
}

// s[line][block] = q[line] . keys of the block; lines of q are D apart, lines of s are PART apart.
template <class Format, int L, int B>
void scores_tile(const float* q, int64_t dim, const typename Format::Stored* const* keys, const typename Format::Stored* const* next,
                 float* s) {
    Wide acc[L][B];
    for (int l = 0; l < L; ++l)
        for (int b = 0; b < B; ++b) acc[l][b] = wide_splat(0);
    auto step = [&](int64_t d) __attribute__((always_inline)) {
        Wide key[B];
        for (int b = 0; b < B; ++b) key[b] = wide_load<Format>(keys[b] + d * BLOCK);
        for (int l = 0; l < L; ++l) {
            Wide x = wide_splat(q[l * dim + d]);
            for (int b = 0; b < B; ++b) acc[l][b] = wide_fma(x, key[b], acc[l][b]);
        }
    };
    if (next) {
        for (int64_t d = 0; d < dim; d += 2) {
            for (int b = 0; b < B; ++b) ask(next[b], d * BLOCK);
            step(d);
            step(d + 1);
        }
    } else {
        for (int64_t d = 0; d < dim; ++d) step(d);
    }
    for (int l = 0; l < L; ++l)
        for (int b = 0; b < B; ++b) wide_store(s + l * PART + b * BLOCK, acc[l][b]);
}
template <class Format, int L>
void scores_lines(const float* q, int64_t dim, const typename Format::Stored* const* keys, const typename Format::Stored* const* next,
                  int64_t blocks, float* s) {
    for (; blocks >= BLOCKS; blocks -= BLOCKS, keys += BLOCKS, s += BLOCKS * BLOCK) {
        scores_tile<Format, L, BLOCKS>(q, dim, keys, next, s);
        if (next) next += BLOCKS;
    }
    if constexpr (BLOCKS > 1) {
        switch (blocks) {
            case 1: scores_tile<Format, L, 1>(q, dim, keys, next, s); break;
            case 2:
                if constexpr (BLOCKS > 2) scores_tile<Format, L, 2>(q, dim, keys, next, s);
                break;
            case 3:
                if constexpr (BLOCKS > 2) scores_tile<Format, L, 3>(q, dim, keys, next, s);
                break;
        }
    }
}

// acc[line] += p[line][key] * value[key] for keys begin .. end - 1 of the span, one after the other.
template <class Format, int L, int N>
void values_tile(const float* p, const typename Format::Stored* const* values, const typename Format::Stored* const* next, int64_t begin,
                 int64_t end, int64_t dim, float* acc) {
    Wide sum[L][N];
    for (int l = 0; l < L; ++l)
        for (int n = 0; n < N; ++n) sum[l][n] = wide_load<F32>(acc + l * dim + n * W);
    for (int64_t key = begin; key < end; ++key) {
        const typename Format::Stored* from = values[key / BLOCK] + key % BLOCK * dim;
        if (next)
            for (int n = 0; n < N; n += 2) ask(next[key / BLOCK], key % BLOCK * dim + n * W);
        Wide value[N];
        for (int n = 0; n < N; ++n) value[n] = wide_load<Format>(from + n * W);
        for (int l = 0; l < L; ++l) {
            Wide x = wide_splat(p[l * PART + key]);
            for (int n = 0; n < N; ++n) sum[l][n] = wide_fma(x, value[n], sum[l][n]);
        }
    }
    for (int l = 0; l < L; ++l)
        for (int n = 0; n < N; ++n) wide_store(acc + l * dim + n * W, sum[l][n]);
}
template <class Format, int L>
void values_lines(const float* p, const typename Format::Stored* const* values, const typename Format::Stored* const* next, int64_t begin,
                  int64_t end, int64_t dim, float* acc) {
    const typename Format::Stored* from[SPAN] = {values[0], values[1], values[2], values[3]};
    int64_t vecs = dim / W;
    auto advance = [&](int n) {
        for (auto& pointer : from) pointer += n * W;
        acc += n * W;
        vecs -= n;
    };
    for (; vecs >= VECS; advance(VECS)) values_tile<Format, L, VECS>(p, from, next, begin, end, dim, acc);
    if constexpr (VECS > 2)
        if (vecs >= 2) values_tile<Format, L, 2>(p, from, next, begin, end, dim, acc), advance(2);
    if constexpr (VECS > 1)
        if (vecs) values_tile<Format, L, 1>(p, from, next, begin, end, dim, acc);
}

// Calls body with the largest register tiles that cover `count` lines.
template <class Body>
TW_INLINE void by_lines(int64_t count, Body&& body) {
    int64_t line = 0;
    for (; line + LINES <= count; line += LINES) body(line, std::integral_constant<int, LINES>());
    switch (count - line) {
        case 1: body(line, std::integral_constant<int, 1>()); break;
        case 2:
            if constexpr (LINES > 2) body(line, std::integral_constant<int, 2>());
            break;
        case 3:
            if constexpr (LINES > 3) body(line, std::integral_constant<int, 3>());
            break;
        case 4:
            if constexpr (LINES > 4) body(line, std::integral_constant<int, 4>());
            break;
        case 5:
            if constexpr (LINES > 5) body(line, std::integral_constant<int, 5>());
            break;
    }
}

// What a thread holds while it works on one tile and kv head.
template <class Format>
struct Work {
    typedef typename Format::Stored Stored;
    const Job& job;
    const Tile& tile;
    int64_t g, dim, group, lines;
    float *q, *score, *part_m, *part_l, *part_acc, *m, *l, *acc, *wide;
    int64_t *first, *last;  // of each line: the key positions it sees
    Upcoming upcoming{};

    Work(const Job& j, const Tile& t, int64_t kv_head, Thread& thread)
        : job(j), tile(t), g(kv_head), dim(j.dim), group(j.group()), lines(t.tokens * j.group()) {
        const int64_t padded = (lines + W - 1) / W * W;
        const int64_t floats = 3 * lines * dim + lines * PART + 4 * padded + SPAN * BLOCK * dim;
        float* at = static_cast<float*>(thread.scratch(floats * sizeof(float) + 2 * padded * sizeof(int64_t)));
        auto take = [&](int64_t n) { return (at += n) - n; };
        q = take(lines * dim), acc = take(lines * dim), part_acc = take(lines * dim), score = take(lines * PART);
        wide = take(SPAN * BLOCK * dim);
        m = take(padded), l = take(padded), part_m = take(padded), part_l = take(padded);
        first = reinterpret_cast<int64_t*>(at), last = first + padded;
    }

    // Queries, scaled to base 2 (2^x is the cheaper exponential; with a soft cap the factor has to come after the cap).
    void take_queries() {
        const Vec factor = splat(job.softcap > 0 ? job.scale : job.scale * 1.44269504f);
        for (int64_t line = 0; line < lines; ++line) {
            const float* from = job.q + ((tile.token + line / group) * job.heads + g * group + line % group) * dim;
            for (int64_t d = 0; d < dim; d += W) store(q + line * dim + d, load(from + d) * factor);
        }
        take_sights();
    }
    void take_sights() {
        for (int64_t token = 0; token < tile.tokens; ++token) {
            const int64_t row = tile.row + (tile.rows > 1 ? token : 0);
            const int64_t own = job.lengths[row] - job.query_start[row + 1] + tile.token + token;
            const int64_t end = job.window < 0 ? job.lengths[row] - 1 : own;
            const int64_t begin = job.sight(end);
            for (int64_t line = token * group; line < (token + 1) * group; ++line) first[line] = begin, last[line] = end;
        }
    }

    // One part for all lines: part_m, part_l and part_acc.
    void part(int64_t index) {
        if (tile.rows == 1) return part_of(index, 0, lines, job.pages(tile.row));
        for (int64_t begin = 0; begin < tile.rows;) {
            int64_t end = begin + 1;
            while (end < tile.rows && same_pages(job, tile.row + begin, tile.row + end, index)) ++end;
            part_of(index, begin * group, end * group, job.pages(tile.row + begin));
            begin = end;
        }
    }

    // One part for lines that find their keys in the same pages.
    void part_of(int64_t index, int64_t line_begin, int64_t line_end, const int32_t* pages) {
        int64_t low = first[line_begin], high = last[line_begin];
        for (int64_t line = line_begin; line < line_end; ++line) {
            low = lesser(low, first[line]), high = greater(high, last[line]);
            part_m[line] = part_l[line] = 0;
        }
        const int64_t tile_last = high;
        // From here on positions count from the start of the part.
        const int64_t base = index * PART;
        low = greater(low - base, 0), high = lesser(high - base, PART - 1);
        if (low > high) return;
        __builtin_memset(part_acc + line_begin * dim, 0, (line_end - line_begin) * dim * sizeof(float));
        const int64_t block_begin = low / BLOCK, block_end = high / BLOCK + 1;

        for (int64_t block = block_begin; block < block_end; block += SPAN) {
            const int64_t blocks = lesser(SPAN, block_end - block);
            const bool more = block + SPAN < block_end;
            spans<true>(pages, base, block, blocks, {pages, g, base + (more ? block + SPAN : block_begin) * BLOCK, base + high},
                        more ? job.k : job.v, line_begin, line_end);
        }
        for (int64_t line = line_begin; line < line_end; ++line) softmax(line, base, block_begin, block_end);
        for (int64_t block = block_begin; block < block_end; block += SPAN) {
            const int64_t blocks = lesser(SPAN, block_end - block);
            if (block + SPAN < block_end)
                spans<false>(pages, base, block, blocks, {pages, g, base + (block + SPAN) * BLOCK, base + high}, job.v, line_begin, line_end);
            else if (base + PART <= tile_last)
                spans<false>(pages, base, block, blocks, {pages, g, base + PART, tile_last}, job.k, line_begin, line_end);
            else
                spans<false>(pages, base, block, blocks, upcoming, job.k, line_begin, line_end);
        }
    }

    // Where a block of 16 keys or values starts.
    TW_INLINE const Stored* find(const void* memory, const int32_t* pages, int64_t position, int64_t kv_head) const {
        const int64_t head = pages[position / job.page_tokens] * job.kv_heads + kv_head;
        return static_cast<const Stored*>(memory) + (head * job.page_tokens + position % job.page_tokens) * dim;
    }
    // The scores (of keys) or the weighted sum (of values) of up to SPAN blocks. Where several register tiles use them they are widened
    // to float32 once. `then` says what is read next, in `memory`.
    template <bool Keys>
    void spans(const int32_t* pages, int64_t base, int64_t block, int64_t blocks, Upcoming then, const void* memory, int64_t line_begin,
               int64_t line_end) {
        const Stored* at[SPAN];
        const Stored* next[SPAN];
        for (int64_t b = 0; b < SPAN; ++b) {
            const int64_t position = then.first + b * BLOCK;
            next[b] = then.pages && position <= then.last ? find(memory, then.pages, position, then.g) : b ? next[b - 1] : nullptr;
        }
        const Stored* const* asked = next[0] ? next : nullptr;
        for (int64_t b = 0; b < blocks; ++b) at[b] = find(Keys ? job.k : job.v, pages, base + (block + b) * BLOCK, g);
        for (int64_t b = blocks; b < SPAN; ++b) at[b] = at[0];
        if constexpr (!std::is_same<Format, F32>::value) {
            if (line_end - line_begin > LINES) {
                const float* widened[SPAN];
                for (int64_t b = 0; b < SPAN; ++b) {
                    widened[b] = wide + (b < blocks ? b : 0) * BLOCK * dim;
                    for (int64_t i = 0; b < blocks && i < BLOCK * dim; i += 2 * W) {
                        if (asked) ask(asked[b], i);
                        wide_store(wide + b * BLOCK * dim + i, wide_load<Format>(at[b] + i));
                        wide_store(wide + b * BLOCK * dim + i + W, wide_load<Format>(at[b] + i + W));
                    }
                }
                return span<Keys, F32>(widened, nullptr, base, block, blocks, line_begin, line_end);
            }
        }
        span<Keys, Format>(at, line_end - line_begin > LINES ? nullptr : asked, base, block, blocks, line_begin, line_end);
    }
    template <bool Keys, class As>
    void span(const typename As::Stored* const* at, const typename As::Stored* const* next, int64_t base, int64_t block, int64_t blocks,
              int64_t line_begin, int64_t line_end) {
        by_lines(line_end - line_begin, [&](int64_t offset, auto count) {
            constexpr int L = decltype(count)::value;
            const int64_t line = line_begin + offset, start = base + block * BLOCK;
            int64_t low = first[line], high = last[line];
            for (int i = 1; i < L; ++i) low = lesser(low, first[line + i]), high = greater(high, last[line + i]);
            low = greater(low - start, 0), high = lesser(high - start, blocks * BLOCK - 1);
            if (low > high) return;
            float* s = score + line * PART + block * BLOCK;
            if constexpr (Keys) {
                const int64_t b = low / BLOCK;
                scores_lines<As, L>(q + line * dim, dim, at + b, next ? next + b : nullptr, high / BLOCK + 1 - b, s + b * BLOCK);
            } else {
                values_lines<As, L>(s, at, next, low, high + 1, dim, part_acc + line * dim);
            }
        });
    }

    // Scores of a line -> weights relative to the part's maximum; 0 for keys it does not see.
    void softmax(int64_t line, int64_t base, int64_t block_begin, int64_t block_end) {
        float* s = score + line * PART;
        const int64_t low = greater(first[line] - base, 0), high = lesser(last[line] - base, PART - 1);
        int64_t begin = low / BLOCK, end = high / BLOCK + 1;
        if (low > high) begin = end = block_end;
        for (int64_t b = block_begin; b < begin; ++b) store(s + b * BLOCK, splat(0));
        for (int64_t b = end; b < block_end; ++b) store(s + b * BLOCK, splat(0));
        if (low > high) return;
        const Vec nothing = splat(-__builtin_inff());
        if (job.softcap > 0) {
            const Vec inverse = splat(1.f / job.softcap), cap = splat(job.softcap * 1.44269504f);
            for (int64_t b = begin; b < end; ++b) store(s + b * BLOCK, cap * tanh(load(s + b * BLOCK) * inverse));
        }
        if (low % BLOCK) store(s + begin * BLOCK, select(iota() < (int32_t)(low % BLOCK), nothing, load(s + begin * BLOCK)));
        if (high % BLOCK != BLOCK - 1)
            store(s + (end - 1) * BLOCK, select(iota() > (int32_t)(high % BLOCK), nothing, load(s + (end - 1) * BLOCK)));
        Vec most = nothing;
        for (int64_t b = begin; b < end; ++b) most = larger(load(s + b * BLOCK), most);
        float peak = largest(most);
        if (peak == -__builtin_inff()) peak = 0;  // only NaN: they stay NaN
        const Vec shift = splat(peak);
        Vec total{};
        for (int64_t b = begin; b < end; ++b) {
            Vec p = exp2(load(s + b * BLOCK) - shift);
            total += p;
            store(s + b * BLOCK, p);
        }
        part_m[line] = peak;
        part_l[line] = sum(total);
    }

    void clear() {
        for (int64_t line = 0; line < lines; ++line) m[line] = l[line] = 0;
    }
    // (m, l, acc) of a line += those of a part. l is 0 only where nothing was seen.
    __attribute__((noinline)) void add_part(int64_t line, float new_m, float new_l, const float* new_acc) {
        if (new_l == 0) return;
        float* to = acc + line * dim;
        if (l[line] == 0) {
            for (int64_t d = 0; d < dim; d += W) store(to + d, load(new_acc + d));
            m[line] = new_m, l[line] = new_l;
            return;
        }
        const float peak = m[line] > new_m ? m[line] : new_m;
        const Vec powers = exp2(Vec{m[line] - peak, new_m - peak});
        const Vec old_factor = splat(powers[0]), new_factor = splat(powers[1]);
        for (int64_t d = 0; d < dim; d += W) store(to + d, fma(load(to + d), old_factor, load(new_acc + d) * new_factor));
        l[line] = l[line] * powers[0] + new_l * powers[1];
        m[line] = peak;
    }
    void finish() {
        for (int64_t line = 0; line < lines; ++line) {
            const int64_t head = g * group + line % group;
            float* out = job.out + ((tile.token + line / group) * job.heads + head) * dim;
            float denominator = l[line], factor = 1;
            if (job.sinks && denominator != 0) {  // one more key without a value
                const float sink = job.sinks[head] * 1.44269504f, peak = m[line] > sink ? m[line] : sink;
                const Vec powers = exp2(Vec{m[line] - peak, sink - peak});
                factor = powers[0];
                denominator = denominator * powers[0] + powers[1];
            }
            const Vec by = splat(denominator == 0 ? 0.f : factor / denominator);
            for (int64_t d = 0; d < dim; d += W) store(out + d, denominator == 0 ? splat(0) : load(acc + line * dim + d) * by);
        }
    }
};

template <class Format>
void whole(const Job& job, const Tile& tile, int64_t g, Upcoming upcoming, Thread& thread) {
    Work<Format> work(job, tile, g, thread);
    work.upcoming = upcoming;
    work.take_queries();
    work.clear();
    int64_t low = work.first[0], high = work.last[0];
    for (int64_t line = 0; line < work.lines; ++line) low = lesser(low, work.first[line]), high = greater(high, work.last[line]);
    for (int64_t part = low / PART; part <= high / PART; ++part) {
        work.part(part);
        for (int64_t line = 0; line < work.lines; ++line)
            work.add_part(line, work.part_m[line], work.part_l[line], work.part_acc + line * work.dim);
    }
    work.finish();
}

template <class Format>
void one_part(const Job& job, const Tile& tile, int64_t g, int64_t part, float* result, Thread& thread) {
    Work<Format> work(job, tile, g, thread);
    work.take_queries();
    work.part(part);
    for (int64_t line = 0; line < work.lines; ++line, result += work.dim + 2) {
        result[0] = work.part_m[line], result[1] = work.part_l[line];
        if (work.part_l[line] != 0) __builtin_memcpy(result + 2, work.part_acc + line * work.dim, work.dim * sizeof(float));
    }
}

template <class Format>
void merge_parts(const Job& job, const Tile& tile, int64_t g, const float* results, int64_t stride, int64_t count, Thread& thread) {
    Work<Format> work(job, tile, g, thread);
    work.clear();
    for (int64_t part = 0; part < count; ++part, results += stride)
        for (int64_t line = 0; line < work.lines; ++line) {
            const float* at = results + line * (work.dim + 2);
            work.add_part(line, at[0], at[1], at + 2);
        }
    work.finish();
}

template <class Format>
Phases phases() {
    return {whole<Format>, one_part<Format>, merge_parts<Format>};
}
Phases phases_f32() { return phases<F32>(); }
Phases phases_f16() { return phases<F16>(); }
Phases phases_bf16() { return phases<BF16>(); }

}  // namespace
}  // namespace TW_NS
}  // namespace tw
#endif
