// Packing: from matrices and GGUF blocks to the layout of pack.h, and back to float32 for tests and fallbacks.
//
// Knows: the block formats of GGUF (ggml's block structures) and the packed layout. Refuses to know: ops, tapes, where the bytes come from.
// These are plain functions, called while a model is loaded; each starts the threads it is told to.
#include "pack.h"

#include <algorithm>
#include <thread>
#include <vector>

namespace tw {
namespace {

template <class F>
void parallel(int64_t items, int threads, F&& body) {
    threads = int(std::max<int64_t>(1, std::min<int64_t>(threads, items)));
    std::vector<std::thread> others;
    for (int id = 1; id < threads; ++id)
        others.emplace_back([=, &body] { for (int64_t i = items * id / threads; i < items * (id + 1) / threads; ++i) body(i); });
    for (int64_t i = 0; i < items / threads; ++i) body(i);
    for (auto& other : others) other.join();
}

Packed describe(int layout, int bits, int halves, int kind, int symmetric, int64_t n, int64_t k) {
    Packed p{};
    p.magic = PACKED_MAGIC;
    p.layout = uint8_t(layout);
    p.bits = uint8_t(bits);
    p.halves = uint8_t(halves);
    p.scales = uint8_t(kind);
    p.symmetric = uint8_t(symmetric);
    p.n = n;
    p.k = k;
    p.blocks = (n + 15) / 16;
    if (layout == LAYOUT_QUANT) {
        int64_t scales = to_line(p.units() * halves * p.scale_bytes());
        p.scale_at = p.units() * p.unit_bytes();
        p.minimum_at = p.scale_at + scales;
        p.block_bytes = p.minimum_at + (symmetric ? 0 : scales) + p.shared_bytes() * (symmetric ? 1 : 2);
    } else {
        p.block_bytes = layout == LAYOUT_F32 ? k * 64 : (k + 1) / 2 * 64;
    }
    return p;
}

uint32_t word(const uint8_t* bytes) {
    uint32_t value;
    std::memcpy(&value, bytes, 4);
    return value;
}

uint16_t half_at(const uint8_t* bytes) { return uint16_t(bytes[0] | bytes[1] << 8); }

// The bit `shift` of each of the four bytes of w, gathered to four neighbouring bits.
uint64_t four_bits(uint32_t w, int shift) { return ((((w >> shift) & 0x01010101u) * 0x01020408u) >> 24) & 15; }

// Writes the 32 quants (eight words of four k) of output r of a unit. The unit must be zeros before its first output.
void put_quants(uint8_t* unit, int bits, int r, const uint32_t* w) {
    if (bits == 8) {
        for (int j = 0; j < 8; ++j) std::memcpy(unit + 64 * j + 4 * r, w + j, 4);
        return;
    }
    for (int j = 0; j < 4; ++j) {
        uint32_t both = (w[j] & 0x0f0f0f0fu) | (w[j + 4] & 0x0f0f0f0fu) << 4;
        std::memcpy(unit + 64 * j + 4 * r, &both, 4);
    }
    for (int plane = 0; plane < bits - 4; ++plane) {
        for (int j = 0; j < 8; ++j) {
            uint8_t* at = unit + 256 + 64 * plane + 8 * j + r / 2;  // byte r / 2 holds the bits of outputs r and r ^ 1
            *at = uint8_t(*at | four_bits(w[j], 4 + plane) << (4 * (r & 1)));
        }
    }
}

void put_f16(const Packed& p, uint8_t* block, int64_t unit, int r, uint16_t scale, uint16_t minimum) {
    const int64_t at = (unit * 16 + r) * 2;
    std::memcpy(block + p.scale_at + at, &scale, 2);
    if (!p.symmetric) std::memcpy(block + p.minimum_at + at, &minimum, 2);
}

void put_f32(const Packed& p, uint8_t* block, int64_t unit, int half, int r, float scale, float minimum) {
    const int64_t at = ((unit * p.halves + half) * 16 + r) * 4;
    std::memcpy(block + p.scale_at + at, &scale, 4);
    if (!p.symmetric) std::memcpy(block + p.minimum_at + at, &minimum, 4);
}

void put_steps(const Packed& p, uint8_t* block, int64_t unit, int half, int r, int scale, int minimum) {
    const int64_t at = (unit * p.halves + half) * 16 + r;
    block[p.scale_at + at] = uint8_t(scale);
    if (!p.symmetric) block[p.minimum_at + at] = uint8_t(minimum);
}

void put_shared(const Packed& p, uint8_t* block, int64_t unit, int r, uint16_t scale, uint16_t minimum) {
    const int64_t at = (unit / 8 * 16 + r) * 2;
    std::memcpy(block + p.shared_scale_at() + at, &scale, 2);
    if (!p.symmetric) std::memcpy(block + p.shared_minimum_at() + at, &minimum, 2);
}

// Only for values that a float16 holds exactly (the caller has checked).
uint16_t float_to_half_exact(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t sign = (bits >> 16) & 0x8000;
    int exponent = int((bits >> 23) & 255) - 112;
    if ((bits & 0x7fffffff) == 0) return uint16_t(sign);
    if (exponent <= 0) {
        float scaled = value < 0 ? -value : value;
        return uint16_t(sign | uint32_t(scaled * 16777216.0f));
    }
    return uint16_t(sign | std::min(exponent, 31) << 10 | ((bits >> 13) & 1023));
}

// ------------------------------------------------------------------------------------------------ GGUF formats
// d: the float16 scale of a block, m: its float16 minimum, qs: low four bits, qh: the bits above them.

struct Format {
    int values, bytes, bits, halves, scales, symmetric;
};
enum { Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K, Q6_K, FORMATS };
constexpr Format formats[FORMATS] = {
    {32, 18, 4, 1, 0, 1}, {32, 20, 4, 1, 0, 0}, {32, 22, 5, 1, 0, 1},    {32, 24, 5, 1, 0, 0},
    {32, 34, 8, 1, 0, 1}, {256, 144, 4, 1, 2, 0}, {256, 176, 5, 1, 2, 0}, {256, 210, 6, 2, 2, 1},
};

// 16 bytes of two nibbles -> words k4 0..3 (low) and 4..7 (high).
void nibbles(const uint8_t* qs, uint32_t* w) {
    for (int j = 0; j < 4; ++j) {
        w[j] = word(qs + 4 * j) & 0x0f0f0f0fu;
        w[j + 4] = word(qs + 4 * j) >> 4 & 0x0f0f0f0fu;
    }
}

// Adds bit 4 j + i of `qh` as bit 4 of byte i of word j.
void fifth_bits(uint32_t qh, uint32_t* w) {
    for (int j = 0; j < 8; ++j) w[j] |= ((qh >> (4 * j) & 15) * 0x00204081u & 0x01010101u) << 4;
}

// Scale and minimum of sub-block s of Q4_K and Q5_K: six bits each, packed in the 12 bytes at `q`.
void k_scale(const uint8_t* q, int s, int& scale, int& minimum) {
    if (s < 4) {
        scale = q[s] & 63;
        minimum = q[s + 4] & 63;
    } else {
        scale = (q[s + 4] & 15) | (q[s - 4] >> 6) << 4;
        minimum = q[s + 4] >> 4 | (q[s] >> 6) << 4;
    }
}

// Packs one file block (32 or 256 values) of output r; `unit` is the first unit of the block.
template <int FORMAT>
void put_block(const Packed& p, uint8_t* block, int64_t unit, int r, const uint8_t* raw) {
    uint32_t w[8];
    uint8_t* at = block + unit * p.unit_bytes();
    const uint16_t d = half_at(raw);
    if (FORMAT == Q4_0 || FORMAT == Q4_1 || FORMAT == Q5_0 || FORMAT == Q5_1) {
        const int head = FORMAT == Q4_0 || FORMAT == Q5_0 ? 2 : 4;
        const bool five = FORMAT == Q5_0 || FORMAT == Q5_1;
        nibbles(raw + head + (five ? 4 : 0), w);
        if (five) fifth_bits(word(raw + head), w);
        put_quants(at, five ? 5 : 4, r, w);
        put_f16(p, block, unit, r, d, half_at(raw + 2));
    } else if (FORMAT == Q8_0) {
        for (int j = 0; j < 8; ++j) w[j] = word(raw + 2 + 4 * j) ^ 0x80808080u;
        put_quants(at, 8, r, w);
        put_f16(p, block, unit, r, d, 0);
    } else if (FORMAT == Q4_K || FORMAT == Q5_K) {
        put_shared(p, block, unit, r, d, half_at(raw + 2) ^ 0x8000);  // these minima are subtracted
        const uint8_t* qs = raw + (FORMAT == Q4_K ? 16 : 48);
        for (int s = 0; s < 8; ++s) {
            for (int j = 0; j < 8; ++j) w[j] = word(qs + s / 2 * 32 + 4 * j) >> (s & 1) * 4 & 0x0f0f0f0fu;
            if (FORMAT == Q5_K)
                for (int j = 0; j < 8; ++j) w[j] |= (word(raw + 16 + 4 * j) >> s & 0x01010101u) << 4;
            put_quants(at + s * p.unit_bytes(), FORMAT == Q4_K ? 4 : 5, r, w);
            int sub_scale, sub_minimum;
            k_scale(raw + 4, s, sub_scale, sub_minimum);
            put_steps(p, block, unit + s, 0, r, sub_scale, sub_minimum);
        }
    } else {  // Q6_K: ql 128 | qh 64 | scales 16 signed | d
        put_shared(p, block, unit, r, half_at(raw + 208), 0);
        for (int s = 0; s < 8; ++s) {  // 32 values: half s / 4 of the block, quarter s % 4 of that
            const uint8_t* ql = raw + s / 4 * 64 + (s & 1) * 32;
            const uint8_t* qh = raw + 128 + s / 4 * 32;
            for (int j = 0; j < 8; ++j)
                w[j] = (word(ql + 4 * j) >> (s & 2) * 2 & 0x0f0f0f0fu) | (word(qh + 4 * j) >> (s & 3) * 2 & 0x03030303u) << 4;
            put_quants(at + s * p.unit_bytes(), 6, r, w);
            for (int half = 0; half < 2; ++half) put_steps(p, block, unit + s, half, r, raw[192 + 2 * s + half], 0);
        }
    }
}

template <int FORMAT>
void pack_blocks(Packed& p, const uint8_t* raw, int threads) {
    const Format& f = formats[FORMAT];
    const int64_t per_row = p.k / f.values, units = f.values / 32;
    parallel(p.blocks, threads, [&](int64_t b) {
        uint8_t* block = p.block(b);
        const int rows = int(std::min<int64_t>(16, p.n - b * 16));
        // Bit planes are put together bit by bit, and so want zeros first.
        const bool planes = f.bits == 5 || f.bits == 6;
        const int64_t keep = rows < 16 || planes ? 0 : p.scale_at;
        std::memset(block + keep, 0, size_t(p.block_bytes - keep));
        // Outputs innermost: a unit's cache lines are finished while they are near.
        for (int64_t j = 0; j < per_row; ++j)
            for (int r = 0; r < rows; ++r) put_block<FORMAT>(p, block, j * units, r, raw + ((b * 16 + r) * per_row + j) * f.bytes);
    });
}

float element(const uint8_t* raw, int source, int64_t index) {
    if (source == 0) {
        float value;
        std::memcpy(&value, raw + index * 4, 4);
        return value;
    }
    uint16_t bits = half_at(raw + index * 2);
    return source == 1 ? half_to_float(bits) : bf16_to_float(bits);
}

template <int SOURCE>
void pack_float(Packed& p, const uint8_t* raw, int threads) {
    parallel(p.blocks, threads, [&](int64_t b) {
        uint8_t* block = p.block(b);
        const int rows = int(std::min<int64_t>(16, p.n - b * 16));
        if (rows < 16 || p.k % 2) std::memset(block, 0, size_t(p.block_bytes));
        for (int r = 0; r < rows; ++r) {
            const int64_t row = (b * 16 + r) * p.k;
            if (p.layout == LAYOUT_F32) {
                float* to = reinterpret_cast<float*>(block) + r;
                for (int64_t k = 0; k < p.k; ++k) to[k * 16] = element(raw, SOURCE, row + k);
            } else {
                uint16_t* to = reinterpret_cast<uint16_t*>(block) + 2 * r;
                for (int64_t k = 0; k < p.k; ++k)
                    to[k / 2 * 32 + k % 2] = SOURCE == 2 ? half_at(raw + (row + k) * 2) : float_to_bf16(element(raw, SOURCE, row + k));
            }
        }
    });
}

// Scale or minimum number `index` of the region at `at`; `shared` is its region of shared factors, if there is one.
float scale_of(const Packed& p, const uint8_t* at, const uint8_t* shared, int64_t index) {
    float value;
    if (p.scales == SCALES_F16) return half_to_float(half_at(at + index * 2));
    if (p.scales == SCALES_STEPS) return half_to_float(half_at(shared + (index / 16 / (8 * p.halves) * 16 + index % 16) * 2)) * float(int8_t(at[index]));
    std::memcpy(&value, at + index * 4, 4);
    return value;
}

// The 16 outputs of a block as float32, row r at out + r * stride; only `rows` of them.
void unpack_block(const Packed& p, const uint8_t* block, int rows, float* out, int64_t stride) {
    for (int r = 0; r < rows; ++r) {
        float* to = out + r * stride;
        for (int64_t k = 0; k < p.k; ++k) {
            if (p.layout == LAYOUT_F32) {
                to[k] = reinterpret_cast<const float*>(block)[k * 16 + r];
            } else if (p.layout == LAYOUT_BF16) {
                to[k] = bf16_to_float(reinterpret_cast<const uint16_t*>(block)[k / 2 * 32 + 2 * r + k % 2]);
            } else {
                const uint8_t* unit = block + k / 32 * p.unit_bytes();
                const int k4 = int(k % 32 / 4), byte = 4 * r + int(k % 4);
                int q;
                if (p.bits == 8) {
                    q = unit[64 * k4 + byte];
                } else {
                    q = unit[64 * (k4 & 3) + byte] >> (k4 / 4 * 4) & 15;
                    for (int plane = 0; plane < p.bits - 4; ++plane)
                        q |= (unit[256 + 64 * plane + 8 * k4 + byte / 8] >> byte % 8 & 1) << (4 + plane);
                }
                const int64_t index = (k / 32 * p.halves + (p.halves == 2 ? k4 / 4 : 0)) * 16 + r;
                const float scale = scale_of(p, block + p.scale_at, block + p.shared_scale_at(), index);
                const float minimum =
                    p.symmetric ? -float(1 << (p.bits - 1)) * scale : scale_of(p, block + p.minimum_at, block + p.shared_minimum_at(), index);
                const float product = scale * float(q);
                to[k] = product + minimum;
            }
        }
    }
}

}  // namespace
}  // namespace tw

using namespace tw;

extern "C" {

// Bytes of a packed matrix, header included.
int64_t tw_packed_bytes(int layout, int bits, int halves, int scales, int symmetric, int64_t n, int64_t k) {
    return describe(layout, bits, halves, scales, symmetric, n, k).bytes();
}

// What a GGUF format becomes: out = bits, halves, scales, symmetric, values per block, bytes per block.
void tw_format_layout(int format, int* out) {
    const Format& f = formats[format];
    const int values[6] = {f.bits, f.halves, f.scales, f.symmetric, f.values, f.bytes};
    std::memcpy(out, values, sizeof values);
}

// raw [n, k] of float32 (source 0), float16 (1) or bfloat16 (2) -> layout f32 or bf16.
void tw_pack_float(const uint8_t* raw, int source, int layout, int64_t n, int64_t k, uint8_t* out, int threads) {
    Packed* p = new (out) Packed(describe(layout, layout == LAYOUT_F32 ? 32 : 16, 1, 0, 0, n, k));
    if (source == 0) pack_float<0>(*p, raw, threads);
    else if (source == 1) pack_float<1>(*p, raw, threads);
    else pack_float<2>(*p, raw, threads);
}

// q [n, k], scale and minimum [n, ceil(k / (32 / halves))] -> layout quant, scales of float16
// (where each is one exactly, and groups are of 32) or float32.
void tw_pack_quant(const uint8_t* q, const float* scale, const float* minimum, int bits, int halves, int scales, int symmetric, int64_t n,
                   int64_t k, uint8_t* out, int threads) {
    Packed* header = new (out) Packed(describe(LAYOUT_QUANT, bits, halves, scales, symmetric, n, k));
    const int64_t group = 32 / halves, groups = (k + group - 1) / group;
    parallel(header->blocks, threads, [&](int64_t b) {
        const Packed& p = *header;
        uint8_t* block = header->block(b);
        std::memset(block, 0, size_t(p.block_bytes));
        const int rows = int(std::min<int64_t>(16, n - b * 16));
        for (int64_t u = 0; u < p.units(); ++u) {
            for (int r = 0; r < rows; ++r) {
                const int64_t row = b * 16 + r, live = std::min<int64_t>(32, k - u * 32);
                uint8_t bytes[32] = {};
                uint32_t w[8];
                std::memcpy(bytes, q + row * k + u * 32, size_t(live));
                std::memcpy(w, bytes, 32);
                put_quants(block + u * p.unit_bytes(), bits, r, w);
                for (int half = 0; half < halves; ++half) {
                    const int64_t g = u * halves + half;
                    if (g >= groups) break;
                    const float s = scale[row * groups + g], m = minimum[row * groups + g];
                    if (scales == SCALES_F32) put_f32(p, block, u, half, r, s, m);
                    else put_f16(p, block, u, r, float_to_half_exact(s), symmetric ? 0 : float_to_half_exact(m));
                }
            }
        }
    });
}

// GGUF blocks of [n, k] as in the file -> layout quant. k is a multiple of the format's block.
void tw_pack_blocks(const uint8_t* raw, int format, int64_t n, int64_t k, uint8_t* out, int threads) {
    const Format& f = formats[format];
    Packed* p = new (out) Packed(describe(LAYOUT_QUANT, f.bits, f.halves, f.scales, f.symmetric, n, k));
    using Function = void (*)(Packed&, const uint8_t*, int);
    static constexpr Function functions[FORMATS] = {pack_blocks<Q4_0>, pack_blocks<Q4_1>, pack_blocks<Q5_0>, pack_blocks<Q5_1>,
                                                    pack_blocks<Q8_0>, pack_blocks<Q4_K>, pack_blocks<Q5_K>, pack_blocks<Q6_K>};
    functions[format](*p, raw, threads);
}

// Two matrices of one layout and shape -> gate and up blocks in turn.
void tw_pack_gated(const uint8_t* gate, const uint8_t* up, uint8_t* out, int threads) {
    const Packed* parts[2] = {reinterpret_cast<const Packed*>(gate), reinterpret_cast<const Packed*>(up)};
    Packed* p = new (out) Packed(*parts[0]);
    p->n *= 2;
    p->blocks *= 2;
    p->gated = 1;
    parallel(p->blocks, threads, [&](int64_t b) { std::memcpy(p->block(b), parts[b & 1]->block(b / 2), size_t(p->block_bytes)); });
}

// Matrices of one layout -> one, along n. n of every part but the last is a multiple of 16.
void tw_pack_stacked(const uint8_t* const* parts, int count, uint8_t* out, int threads) {
    Packed* p = new (out) Packed(*reinterpret_cast<const Packed*>(parts[0]));
    p->n = p->blocks = 0;
    for (int i = 0; i < count; ++i) {
        const Packed* part = reinterpret_cast<const Packed*>(parts[i]);
        parallel(part->blocks, threads, [&](int64_t b) { std::memcpy(p->block(p->blocks + b), part->block(b), size_t(p->block_bytes)); });
        p->n += part->n;
        p->blocks += part->blocks;
    }
}

// Packed -> float32 [n, k]; of a gated matrix all gate rows, then all up rows.
void tw_unpack(const uint8_t* packed, float* out, int threads) {
    const Packed* p = reinterpret_cast<const Packed*>(packed);
    const int64_t half = p->gated ? p->n / 2 : p->n;
    parallel(p->blocks, threads, [&](int64_t b) {
        const int64_t row = p->gated ? b / 2 * 16 : b * 16, base = p->gated && b & 1 ? half : 0;
        unpack_block(*p, p->block(b), int(std::min<int64_t>(16, half - row)), out + (base + row) * p->k, p->k);
    });
}
}
