// Low-rank additions to a matmul (LoRA, Hu et al. 2021), for rows of many adapters at once; and gate and up made one.
//
//      out[t] += B[s] (A[s] x[t]),  s the adapter of row t; rows without one (s < 0) stay as they are
//
// Rows are sorted by adapter and cut into blocks of one adapter each, so that an adapter's matrices are read once for all of a block's rows.
// A row's result does not depend on its neighbours.
#ifndef TW_LEVEL
#include "runtime.h"

namespace tw {
namespace {

constexpr int64_t BLOCK_ROWS = 32;
constexpr int64_t BLOCK_COLUMNS = 512;

struct Block {
    int32_t begin, rows, adapter;  // places in `order`
};

struct Job {
    const float* x;
    int64_t depth;
    const float *a, *b;  // [S, K, R] and [S, R, N]
    int64_t rank, columns;
    const int32_t* adapters;
    int64_t slots;
    float* out;
    int64_t out_width, start, rows;
    float* inner;  // [T, R], in the order of `order`
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

// x, K, A, B, R, N, adapter of each row, adapters, out, its width, first column, room for [T, R], count
TW_OP(add_low_rank, 13) {
    using namespace tw;
    const Job job{ptr<float>(a[0]), a[1].i, ptr<float>(a[2]), ptr<float>(a[3]), a[4].i, a[5].i, ptr<int32_t>(a[6]), a[7].i, ptr<float>(a[8]),
                  a[9].i, a[10].i, live(a[12]), ptr<float>(a[11])};
    int64_t used = 0;
    for (int64_t row = 0; row < job.rows; ++row) used += job.adapters[row] >= 0;
    if (!used) return;
    Block* blocks = static_cast<Block*>(t.scratch(job.rows * (sizeof(int32_t) + sizeof(Block)) + (job.slots + 1) * sizeof(int32_t), Thread::MORE));
    int32_t *order = reinterpret_cast<int32_t*>(blocks + job.rows), *next = order + job.rows;
    const int64_t count = sort_rows(job, next, order, blocks), pieces = (job.columns + BLOCK_COLUMNS - 1) / BLOCK_COLUMNS;
    const auto down = TW_PICK(t, down_block), up = TW_PICK(t, up_block);
    t.chunks(count, [&](int64_t item) { down(job, blocks[item], order, 0, t); });
    t.barrier();
    t.chunks(count * pieces, [&](int64_t item) { up(job, blocks[item / pieces], order, item % pieces * BLOCK_COLUMNS, t); }, 1);
}

// x [T, 2F], F, activation, out [T, F], count
TW_OP(glue, 5) {
    using namespace tw;
    const auto row = TW_PICK(t, glue_row);
    const Thread::Range part = t.share(live(a[4]));
    for (int64_t i = part.begin; i < part.end; ++i) row(ptr<float>(a[0]) + i * 2 * a[1].i, a[1].i, a[2].i, ptr<float>(a[3]) + i * a[1].i);
}

#else
#include "product.h"

namespace tw {
namespace TW_NS {
namespace {

// inner = x A of a block's rows.
void down_block(const Job& job, const Block& block, const int32_t* order, int64_t, Thread& thread) {
    float* x = static_cast<float*>(thread.scratch(block.rows * job.depth * sizeof(float)));
    for (int64_t i = 0; i < block.rows; ++i)
        __builtin_memcpy(x + i * job.depth, job.x + order[block.begin + i] * job.depth, job.depth * sizeof(float));
    product<F32, F32, false>(block.rows, job.rank, job.depth, x, job.depth, job.a + block.adapter * job.depth * job.rank, job.rank,
                             job.inner + block.begin * job.rank, job.rank);
}

// out += inner B of a block's rows and some columns.
void up_block(const Job& job, const Block& block, const int32_t* order, int64_t first, Thread& thread) {
    const int64_t columns = lesser(BLOCK_COLUMNS, job.columns - first), padded = (columns + W - 1) / W * W, width = (job.columns + W - 1) / W * W;
    float* sum = static_cast<float*>(thread.scratch(block.rows * padded * sizeof(float)));
    product<F32, F32, false>(block.rows, padded, job.rank, job.inner + block.begin * job.rank, job.rank,
                             job.b + block.adapter * job.rank * width + first, width, sum, padded);
    for (int64_t i = 0; i < block.rows; ++i) {
        float* out = job.out + order[block.begin + i] * job.out_width + job.start + first;
        for (int64_t n = 0; n < columns; ++n) out[n] += sum[i * padded + n];
    }
}

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
