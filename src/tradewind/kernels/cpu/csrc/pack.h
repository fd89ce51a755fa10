// How a weight matrix lies in memory once it is packed.
//
// Knows: the one memory layout that packing writes and the matmuls read. Refuses to know: arithmetic, threads, files.
//
//     header (64 bytes) | block 0 | block 1 | ...        a block is 16 outputs, all of K; two blocks make a strip
//
// Within a block of the float layouts:   f32   for k:       16 floats                                (64 bytes)
//                                        bf16  for k by 2:  16 x (w[k], w[k + 1])                    (64 bytes)
// Within a block of the quant layout, by units of 32 k (value = scale * q + minimum, q unsigned):
//     for each unit   8 bits: 8 vectors; vector j, byte 4 r + i is q of output r, k = 4 j + i
//                     4 bits: 4 vectors; vector j holds k4 = j in its low and k4 = j + 4 in its high nibbles
//                     5, 6:   the 4-bit vectors, then one or two planes of 8 masks of 64 bits: bit 4 r + i of mask j as above
//     then the scales [unit][half][16] and, unless symmetric, the minima the same way, as `scales` says:
//         float16 | float32 | steps: int8, times a float16 that 8 units share; those [unit / 8][16] lie behind, the minima's last
//     `halves` is 2 when groups are of 16: half 0 is k4 0..3 and half 1 is k4 4..7.
// Each of these regions is padded to whole cache lines.
// Symmetric: minimum = -2^(bits - 1) * scale, not stored. Outputs and k beyond the matrix are zeros, with zero scales.
// Gated: block 2 j is 16 gate outputs and block 2 j + 1 the 16 up outputs beside them; n counts both.
#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tw {

enum Scales : uint8_t { SCALES_F16 = 0, SCALES_F32 = 1, SCALES_STEPS = 2 };
enum Layout : uint8_t { LAYOUT_F32 = 0, LAYOUT_BF16 = 1, LAYOUT_QUANT = 2 };

inline int64_t to_line(int64_t bytes) { return (bytes + 63) / 64 * 64; }

struct Packed {
    uint32_t magic;
    uint8_t layout, bits, halves, scales, symmetric, gated;
    uint8_t unused[6];
    int64_t n, k, blocks, block_bytes, scale_at, minimum_at;  // the last two: offsets within a block

    const uint8_t* block(int64_t index) const { return reinterpret_cast<const uint8_t*>(this + 1) + index * block_bytes; }
    uint8_t* block(int64_t index) { return reinterpret_cast<uint8_t*>(this + 1) + index * block_bytes; }
    int64_t units() const { return (k + 31) / 32; }
    int64_t unit_bytes() const { return 64 * int64_t(bits); }
    int64_t scale_bytes() const { return scales == SCALES_F32 ? 64 : scales == SCALES_F16 ? 32 : 16; }  // of one half of one unit
    int64_t shared_bytes() const { return scales == SCALES_STEPS ? to_line((units() + 7) / 8 * 32) : 0; }
    int64_t shared_scale_at() const { return block_bytes - shared_bytes() * (symmetric ? 1 : 2); }
    int64_t shared_minimum_at() const { return block_bytes - shared_bytes(); }
    int64_t bytes() const { return int64_t(sizeof(Packed)) + blocks * block_bytes; }
};
static_assert(sizeof(Packed) == 64, "the blocks behind the header must stay on cache lines");

constexpr uint32_t PACKED_MAGIC = 0x31575754;  // "TWW1"

// Exponent and fraction moved to float32's places and scaled by 2^112: exact, denormals too; only infinities and NaN need a word more.
inline float half_to_float(uint16_t h) {
    uint32_t bits = uint32_t(h & 0x7fff) << 13;
    float value;
    std::memcpy(&value, &bits, 4);
    value *= 5.192296858534828e33f;
    std::memcpy(&bits, &value, 4);
    bits |= uint32_t(h & 0x8000) << 16 | ((h & 0x7c00) == 0x7c00 ? 0x7f800000u : 0u);
    std::memcpy(&value, &bits, 4);
    return value;
}

inline float bf16_to_float(uint16_t h) {
    uint32_t bits = uint32_t(h) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// To nearest, ties to even; a NaN stays a NaN.
inline uint16_t float_to_bf16(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 64);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace tw
