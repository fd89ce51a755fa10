// Low-rank additions to a matmul (LoRA, Hu et al. 2021), for rows of many adapters at once; and gate and up made one.
//
//      out[t] += B[s] (A[s] x[t]),  s the adapter of row t; rows without one (s < 0) stay as they are
//
// A matmul may be of several matrices stacked along their outputs (q, k, v), its parts; each has a change of its own, of its own rank, or none.
// Rows are sorted by adapter and cut into blocks of one adapter each, so that an adapter's matrices are read once for all of a block's rows,
// from front to back: both lie in panels of 16 columns.
//      A [S][panels of all parts' ranks][K][16]      B [S][panels of all parts' outputs][R][16]
// A row's result does not depend on its neighbours: each number is one sum in the order of k.
#ifndef TW_LEVEL
#include "runtime.h"

namespace tw {
namespace {

constexpr int64_t BLOCK_ROWS = 32;
constexpr int64_t PANELS = 8;  // of B that a thread takes at a time

struct Block {
    int32_t begin, rows, adapter;  // places in `order`
};

struct Job {
    const float* x;
    int64_t depth;
    const void *a, *b;
    int64_t halves;       // whether a and b are bfloat16
    int64_t rank, parts;  // rank: a multiple of 16
    const int32_t* sizes;  // [parts] outputs
    const int32_t* ranks;  // [S, parts] ranks in use, multiples of 16; 0: this adapter leaves the part as it is
    const int32_t* adapters;
    int64_t slots;
    float* out;
    int64_t width, rows;
    float* inner;  // [T, parts, R], in the order of `order`
    int64_t panels;  // of all parts' outputs
};

// Rows by adapter, in their own order within one; every thread finds the same. Returns the number of blocks.
int64_t sort_rows(const Job& job, int32_t* next, int32_t* order, Block* blocks) {
    std::memset(next, 0, (job.slots + 1) * sizeof(int32_t));
    for (int64_t row = 0; row < job.rows; ++row)
        if (job.adapters[row] >= 0) ++next[job.adapters[row] + 1];
    int64_t count = 0;
    for (int32_t adapter = 0; adapter < job.slots; ++adapter) {
        const int32_t begin = next[adapter], end = next[adapter + 1] += begin;
        for (int32_t at = begin; at < end; at += BLOCK_ROWS) blocks[count++] = {at, (int32_t)(end - at < BLOCK_ROWS ? end - at : BLOCK_ROWS), adapter};
    }
    for (int32_t row = 0; row < job.rows; ++row)
        if (job.adapters[row] >= 0) order[next[job.adapters[row]]++] = row;
    return count;
}

}  // namespace
}  // namespace tw

#define TW_SOURCE "low_rank.cpp"
#include "each_level.h"

// x, K, A, B, whether they are bfloat16, R, parts, outputs of each, ranks in use, adapter of each row, adapters, out, its width, room for
// [T, parts, R], count
TW_OP(add_low_rank, 15) {
    using namespace tw;
    Job job{ptr<float>(a[0]),   a[1].i,  a[2].p,          a[3].p,  a[4].i,      a[5].i,           a[6].i, ptr<int32_t>(a[7]), ptr<int32_t>(a[8]),
            ptr<int32_t>(a[9]), a[10].i, ptr<float>(a[11]), a[12].i, live(a[14]), ptr<float>(a[13]), 0};
    int64_t used = 0;
    for (int64_t row = 0; row < job.rows; ++row) used += job.adapters[row] >= 0;
    if (!used) return;
    for (int64_t part = 0; part < job.parts; ++part) job.panels += (job.sizes[part] + 15) / 16;
    Block* blocks = static_cast<Block*>(t.scratch(job.rows * (sizeof(int32_t) + sizeof(Block)) + (job.slots + 1) * sizeof(int32_t), Thread::MORE));
    int32_t *order = reinterpret_cast<int32_t*>(blocks + job.rows), *next = order + job.rows;
    const int64_t count = sort_rows(job, next, order, blocks), inner = job.parts * (job.rank / 16), pieces = (job.panels + PANELS - 1) / PANELS;
    const auto down = job.halves ? TW_PICK(t, down_halves) : TW_PICK(t, down_floats);
    const auto up = job.halves ? TW_PICK(t, up_halves) : TW_PICK(t, up_floats);
    t.chunks(count * inner, [&](int64_t item) { down(job, blocks[item / inner], order, item % inner); });
    t.barrier();
    t.chunks(count * pieces, [&](int64_t item) { up(job, blocks[item / pieces], order, item % pieces * PANELS); }, 1);
}

// x [T, 2F], F, activation, out [T, F], count
TW_OP(glue, 5) {
    using namespace tw;
    const auto row = TW_PICK(t, glue_row);
    const Thread::Range part = t.share(live(a[4]));
    for (int64_t i = part.begin; i < part.end; ++i) row(ptr<float>(a[0]) + i * 2 * a[1].i, a[1].i, a[2].i, ptr<float>(a[3]) + i * a[1].i);
}

#else

namespace tw {
namespace TW_NS {
namespace {

// Rows that share a load of a panel: as many as there are registers for their sums.
#if TW_LEVEL == 2
constexpr int TOGETHER = 8;
#elif TW_LEVEL == 1
constexpr int TOGETHER = 3;
#else
constexpr int TOGETHER = 1;
#endif

// Lines of a panel that are asked for before their turn: banks are larger than the caches, and the hardware's own guesses end with each page
// (measured: half the time of a step with 8 adapters).
constexpr int64_t AHEAD = 96;

// sum[l][i] = x[l] + i * step times panel i, [depth][16] each: two at a time, because one alone would wait for its own additions.
template <class Format, int L, int N>
TW_INLINE void panel_product(int64_t depth, const float* const* x, int64_t step, const typename Format::Stored* const* panel, Wide (*sum)[N]) {
    for (int l = 0; l < L; ++l)
        for (int i = 0; i < N; ++i) sum[l][i] = wide_splat(0);
    for (int64_t k = 0; k < depth; ++k) {
        Wide row[N];
        for (int i = 0; i < N; ++i) {
            row[i] = wide_load<Format>(panel[i] + k * W);
            __builtin_prefetch(panel[i] + (k + AHEAD) * W);
        }
        for (int l = 0; l < L; ++l)
            for (int i = 0; i < N; ++i) sum[l][i] = wide_fma(wide_splat(x[l][k + i * step]), row[i], sum[l][i]);
    }
}

template <class Format, int L>
void down_rows(const Job& job, const int32_t* order, const typename Format::Stored* panel, float* inner, int64_t stride) {
    const float* x[L];
    for (int l = 0; l < L; ++l) x[l] = job.x + order[l] * job.depth;
    // Both halves of the depth beside each other.
    const int64_t half = job.depth / 2;
    const typename Format::Stored* halves[2] = {panel, panel + half * W};
    Wide sum[L][2];
    panel_product<Format, L, 2>(half, x, half, halves, sum);
    for (int l = 0; l < L; ++l) {
        Wide both = wide_fma(wide_splat(1), sum[l][0], sum[l][1]);
        if (job.depth & 1) both = wide_fma(wide_splat(x[l][job.depth - 1]), wide_load<Format>(panel + (job.depth - 1) * W), both);
        wide_store(inner + l * stride, both);
    }
}

// inner = x A of a block's rows, 16 of the ranks.
template <class Format>
void down_panel(const Job& job, const Block& block, const int32_t* order, int64_t index) {
    const int64_t each = job.rank / W, part = index / each, stride = job.parts * job.rank;
    if (index % each * W >= job.ranks[block.adapter * job.parts + part]) return;
    const auto* panel = static_cast<const typename Format::Stored*>(job.a) + (block.adapter * job.parts * each + index) * job.depth * W;
    float* inner = job.inner + block.begin * stride + index * W;
    const int32_t* row = order + block.begin;
    int64_t left = block.rows;
    for (; left >= TOGETHER; left -= TOGETHER, row += TOGETHER, inner += TOGETHER * stride)
        down_rows<Format, TOGETHER>(job, row, panel, inner, stride);
    if constexpr (TOGETHER > 4)
        if (left >= 4) down_rows<Format, 4>(job, row, panel, inner, stride), left -= 4, row += 4, inner += 4 * stride;
    if constexpr (TOGETHER > 2)
        if (left >= 2) down_rows<Format, 2>(job, row, panel, inner, stride), left -= 2, row += 2, inner += 2 * stride;
    if (left) down_rows<Format, 1>(job, row, panel, inner, stride);
}

// N panels beside each other; the last may have fewer columns than a panel.
template <class Format, int L, int N>
void up_rows(const Job& job, const int32_t* order, int64_t depth, const float* inner, int64_t stride, const typename Format::Stored* panel,
             int64_t first, int64_t columns) {
    const float* x[L];
    for (int l = 0; l < L; ++l) x[l] = inner + l * stride;
    const typename Format::Stored* panels[N];
    for (int i = 0; i < N; ++i) panels[i] = panel + i * job.rank * W;
    Wide sum[L][N];
    panel_product<Format, L, N>(depth, x, 0, panels, sum);
    for (int l = 0; l < L; ++l) {
        float* out = job.out + order[l] * job.width + first;
        for (int i = 0; i < N; ++i) {
            if (i < N - 1 || columns == N * W) {
                wide_store(out + i * W, wide_fma(wide_splat(1), sum[l][i], wide_load<F32>(out + i * W)));
            } else {
                float part[W];
                wide_store(part, sum[l][i]);
                for (int64_t n = 0; n < columns - i * W; ++n) out[i * W + n] += part[n];
            }
        }
    }
}
template <class Format, int N>
void up_tile(const Job& job, const Block& block, const int32_t* order, int64_t depth, const float* inner, int64_t stride,
             const typename Format::Stored* panel, int64_t at, int64_t columns) {
    const int32_t* row = order + block.begin;
    int64_t left = block.rows;
    for (; left >= TOGETHER; left -= TOGETHER, row += TOGETHER, inner += TOGETHER * stride)
        up_rows<Format, TOGETHER, N>(job, row, depth, inner, stride, panel, at, columns);
    if constexpr (TOGETHER > 4)
        if (left >= 4) up_rows<Format, 4, N>(job, row, depth, inner, stride, panel, at, columns), left -= 4, row += 4, inner += 4 * stride;
    if constexpr (TOGETHER > 2)
        if (left >= 2) up_rows<Format, 2, N>(job, row, depth, inner, stride, panel, at, columns), left -= 2, row += 2, inner += 2 * stride;
    if (left) up_rows<Format, 1, N>(job, row, depth, inner, stride, panel, at, columns);
}

// out += inner B of a block's rows and some panels' columns.
template <class Format>
void up_panels(const Job& job, const Block& block, const int32_t* order, int64_t first) {
    const int64_t stride = job.parts * job.rank, end = lesser(first + PANELS, job.panels);
    int64_t begin = 0, start = 0;  // of the part: its first panel, its first column
    for (int64_t part = 0; part < job.parts && begin < end; ++part) {
        const int64_t count = (job.sizes[part] + W - 1) / W, depth = job.ranks[block.adapter * job.parts + part];
        const float* inner = job.inner + block.begin * stride + part * job.rank;
        for (int64_t index = greater(first, begin); depth && index < lesser(end, begin + count);) {
            const auto* panel = static_cast<const typename Format::Stored*>(job.b) + (block.adapter * job.panels + index) * job.rank * W;
            const int64_t from = (index - begin) * W, left = job.sizes[part] - from, two = index + 1 < lesser(end, begin + count);
            if (two) {
                up_tile<Format, 2>(job, block, order, depth, inner, stride, panel, start + from, lesser(2 * W, left));
            } else {
                up_tile<Format, 1>(job, block, order, depth, inner, stride, panel, start + from, lesser(W, left));
            }
            index += 1 + two;
        }
        begin += count, start += job.sizes[part];
    }
}
void down_floats(const Job& job, const Block& block, const int32_t* order, int64_t index) { down_panel<F32>(job, block, order, index); }
void down_halves(const Job& job, const Block& block, const int32_t* order, int64_t index) { down_panel<BF16>(job, block, order, index); }
void up_floats(const Job& job, const Block& block, const int32_t* order, int64_t first) { up_panels<F32>(job, block, order, first); }
void up_halves(const Job& job, const Block& block, const int32_t* order, int64_t first) { up_panels<BF16>(job, block, order, first); }

TW_INLINE Vec glued(Vec gate, Vec up, int64_t activation) {
    Vec inner = gate;
    if (activation == 1) {  // the tanh form of GELU: g * sigmoid(2 sqrt(2 / pi) (g + 0.044715 g^3))
        inner = 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate);
    } else if (activation == 2) {  // the clamped form of gpt-oss; comparisons let a NaN through
        gate = select(gate > splat(7.f), splat(7.f), gate);
        up = select(up > splat(7.f), splat(7.f), up);
        up = select(up < splat(-7.f), splat(-7.f), up) + 1.f;
        inner = 1.702f * gate;
    }
    return gate / (1.f + exp(-inner)) * up;
}
void glue_row(const float* x, int64_t n, int64_t activation, float* out) {
    int64_t i = 0;
    for (; i + W <= n; i += W) store(out + i, glued(load(x + i), load(x + n + i), activation));
    if (i < n) store_part(out + i, n - i, glued(load_part(x + i, n - i, 0), load_part(x + n + i, n - i, 0), activation));
}

}  // namespace
}  // namespace TW_NS
}  // namespace tw
#endif
