// What the matmul ops and their instruction-set paths agree on.
//
// Knows: tiles, prepared activations, epilogues. Refuses to know: who calls, tapes, how weights were made.
//
// A tile is one strip (two 16-output blocks) x up to `max_rows` rows, over all of K. Each output has one chain of float operations in
// ascending k, the same in every tile of a path, so a row's result does not depend on its neighbours, its place or the threads.
//
// Prepared activations, one row after the other:   f32   the caller's own rows
//                                                  bf16  k rounded to bfloat16, padded to an even number
//                                                  quant by units of 32 k, 48 bytes:  32 x int8 | sx | a0 | a1 | unused
// With sx = absmax / 127 of the unit: x = sx * q. Where the matrix is symmetric, a0, a1 = -2^(bits - 1) * sum(q) (int32: where the integer
// dot product starts, so that unsigned quants act as signed ones); otherwise sx * sum(q) (float, times the minimum). By halves: a0 for
// k 0..15, a1 for k 16..31 (groups of 16); else a0 for all 32.
//
// With two terms (compute int16) a row is prepared twice: as above, and then what that left over, x - sx * q, in steps of sx / 256; both are
// units of the same shape, the second `x_stride / 2` bytes behind the first. Either a tile knows this and multiplies dot * 256 + dot' once
// (tile_two), or it sees two rows, and their sums are added before the epilogue. About 15 bits of each value are kept.
#pragma once
#include "pack.h"
#include "runtime.h"

namespace tw {

constexpr int UNIT = 48;      // bytes of a prepared unit of 32 k
constexpr int MAX_ROWS = 12;  // of any tile
constexpr int STRIP = 32;     // outputs of a tile
constexpr int64_t BAND_BYTES = int64_t(384) << 10;  // prepared rows that stay in the second-level cache while strips pass by

// SWIGLU_CLAMPED: (up + 1) g sigmoid(1.702 g), g the gate cut at 7, up cut at +-7. The others: activation(gate) * up.
enum Activation : int64_t { SILU = 0, GELU_TANH = 1, SWIGLU_CLAMPED = 2 };
constexpr float SWIGLU_ALPHA = 1.702f, SWIGLU_LIMIT = 7.0f;

// A strip: its two blocks, and the strip that this thread multiplies next (null: not known), to be fetched meanwhile.
struct Strip {
    const uint8_t *w0, *w1, *next;
};

// acc[row][32] = the sums of the strip for `rows` prepared rows at x.
using Tile = void (*)(const Packed& p, const Strip& w, const uint8_t* x, int64_t x_stride, int rows, float* acc);
using Prepare = void (*)(const Packed& p, const float* x, uint8_t* out);
// The second term of a prepared quant row: x, the first term, where to.
using PrepareFine = void (*)(const Packed& p, const float* x, const uint8_t* coarse, uint8_t* out);

// Where results go: columns [column, column + columns) of `rows` rows from `out` on.
struct Store {
    float* out;
    int64_t stride;        // floats
    const float* bias[2];  // of the strip's two blocks, or null
    int columns[2];        // live outputs of the blocks, 0..16; of a gated strip both are the same
    int64_t activation;
};
using Finish = void (*)(const float* acc, int rows, const Store& to);

struct Path {
    int max_rows;
    Tile tile;
    Prepare prepare;  // null: the caller's rows are used as they are
    Finish finish, finish_gated;
    PrepareFine prepare_fine;
    Tile tile_two;  // rows of two terms; null: two rows of `tile`, added
};

// Bytes of one row in one term as this matrix wants it; 0 where the caller's own row will do.
int64_t prepared_stride(const Packed& p);

// How the rows of one call meet matrices of one layout: which tiles, and how a row is prepared for them.
struct Rows {
    Path path;
    int64_t terms, term, stride;  // bytes of a row's first term, and of all of them
    int64_t tile_rows;            // rows that a tile takes
    bool folded;                  // two terms as two rows of a tile
};
// x_stride: floats from row to row of the caller's x, which is used as it is where the layout needs no preparing.
Rows rows_for(const Packed& p, int isa, int64_t terms, int64_t x_stride);
// One row, in all its terms; only where there is something to prepare (rows.path.prepare).
void prepare_row(const Rows& rows, const Packed& p, const float* x, uint8_t* out);
// acc[row][32] = the sums of a strip for `count` <= tile_rows rows at x.
void strip_sums(const Rows& rows, const Packed& p, const Strip& w, const uint8_t* x, int count, float* acc);
inline Strip strip_of(const Packed& p, int64_t strip, int64_t next) {
    // An odd last block is computed twice, stored once.
    const int64_t second = 2 * strip + 1 < p.blocks ? 2 * strip + 1 : p.blocks - 1;
    return {p.block(2 * strip), p.block(second), next < 0 ? nullptr : p.block(2 * next)};
}

// Most of the items as fixed parts (no traffic between cores), the last ones one by one, so that a disturbed core is helped.
// body(item, next): `next` is the item this thread does afterwards, or -1.
template <class F>
void share_items(Thread& t, int64_t items, F&& body, int lane = 0) {
    const int64_t each = t.count == 1 ? items : items * 2 / (3 * t.count), fixed = each * t.count;
    const int64_t end = each * (t.id + 1);
    auto claim = [&] {
        if (fixed == items) return int64_t(-1);
        const int64_t got = fixed + t.lanes[lane].fetch_add(1, std::memory_order_relaxed);
        return got < items ? got : int64_t(-1);
    };
    int64_t item = each ? each * t.id : claim();
    while (item >= 0) {
        const int64_t next = item + 1 < end ? item + 1 : claim();
        body(item, next);
        item = next;
    }
}

Path portable_path(const Packed& p);
#if defined(__x86_64__)
Path avx2_path(const Packed& p);
Path avx512_path(const Packed& p, bool bf16);
#endif

}  // namespace tw

// Functions between TW_TARGET(...) and TW_TARGET_END are compiled for those instruction sets; standard headers come before.
#if defined(__clang__)
#define TW_PRAGMA(X) _Pragma(#X)
#define TW_TARGET(SETS) TW_PRAGMA(clang attribute push(__attribute__((target(SETS))), apply_to = function))
#define TW_TARGET_END _Pragma("clang attribute pop")
#else
#define TW_PRAGMA(X) _Pragma(#X)
#define TW_TARGET(SETS) _Pragma("GCC push_options") TW_PRAGMA(GCC target(SETS))
#define TW_TARGET_END _Pragma("GCC pop_options")
#endif
