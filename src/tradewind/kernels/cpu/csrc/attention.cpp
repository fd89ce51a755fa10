// Causal attention over paged keys and values, for rows of any length: one token of a decode step or a whole prompt.
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
// computed together so that a key that was loaded and widened once serves them all. Rows of one token that share pages (a common prefix)
// share a tile, too.
#ifndef TW_LEVEL
#define TW_SOURCE "attention.cpp"
#include "each_level.h"

namespace tw {
namespace {

constexpr int64_t BLOCK = 16;    // keys in a vector
constexpr int64_t PART = 256;    // keys whose softmax is computed at once; a constant of the result, never tuned by shape
constexpr int64_t TILE_LINES = 48;  // lines that share a widened key: more save conversions, fewer keep scores in the nearest cache

struct Tile {
    int32_t token, tokens;        // of the step
    int32_t row, rows;            // one row, or several rows of one token each
};

struct Job {
    const float* q;
    const void *k, *v;
    int64_t format, page_tokens, kv_heads, heads, dim;
    const int32_t *query_start, *lengths, *page_table;
    int64_t table_width, rows;
    float scale, softcap;
    int64_t window;
    const float* sinks;
    float* out;
    float* parts;  // (m, l, acc[D]) of each line and part, when parts are spread over threads
    int64_t parts_bytes;

    int64_t group() const { return heads / kv_heads; }
    // Everything is in scaled base 2: 2^x needs no multiplication. With a soft cap the factor comes after the cap.
    float q_factor() const { return softcap > 0 ? scale : scale * 1.44269504f; }
    int64_t position(int64_t row, int64_t token) const { return lengths[row] - query_start[row + 1] + token; }
};

// First and last key position that a token sees.
struct Sight {
    int64_t first, last;
};
inline Sight sight(const Job& job, int64_t row, int64_t token) {
    int64_t last = job.position(row, token), first = 0;
    if (job.window > 0 && last - job.window + 1 > 0) first = last - job.window + 1;
    return {first, last};
}

inline bool same_pages(const Job& job, int64_t a, int64_t b, int64_t part) {
    int64_t begin = part * PART / job.page_tokens, end = ((part + 1) * PART + job.page_tokens - 1) / job.page_tokens;
    if (end > job.table_width) end = job.table_width;
    return std::memcmp(job.page_table + a * job.table_width + begin, job.page_table + b * job.table_width + begin,
                       (end - begin) * sizeof(int32_t)) == 0;
}

// Cuts the step into tiles; every thread finds the same ones.
int64_t make_tiles(const Job& job, int threads, Tile* tiles) {
    int64_t most = TILE_LINES / job.group();
    if (most < 1) most = 1;
    int64_t lone = 0;  // rows of one token
    for (int64_t row = 0; row < job.rows; ++row) lone += job.query_start[row + 1] - job.query_start[row] == 1;
    // Sharing rows must leave enough tiles for the threads.
    int64_t most_rows = lone * job.kv_heads / (4 * threads);
    if (most_rows > most) most_rows = most;
    int64_t count = 0;
    for (int64_t row = 0; row < job.rows; ++row) {
        int64_t begin = job.query_start[row], end = job.query_start[row + 1];
        if (end - begin == 1 && count > 0) {
            Tile& last = tiles[count - 1];
            if (last.tokens == last.rows && last.rows < most_rows && last.row + last.rows == row && job.lengths[row] > PART / 2 &&
                job.lengths[row - 1] > PART / 2 && same_pages(job, row - 1, row, 0)) {
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

}  // namespace
}  // namespace tw

#undef TW_JOB_PHASES
namespace tw {
namespace {
struct Phases {
    // All parts of a tile for one kv head, start to end.
    void (*whole)(const Job&, const Tile&, int64_t g, Thread&);
    // One part of a tile for one kv head, left in job.parts at `at`.
    void (*part)(const Job&, const Tile&, int64_t g, int64_t part, float* at, Thread&);
    // Merges the parts that `part` left, in order.
    void (*merge)(const Job&, const Tile&, int64_t g, int64_t parts, const float* at, Thread&);
};
}  // namespace
}  // namespace tw
#define TW_ATTENTION_TYPES 1
#define TW_SECOND_PASS
#endif
