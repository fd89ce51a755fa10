// Rope angles where each pair of dims turns with one of several positions of its token (images: time, row, column).
#include "runtime.h"

#include <cmath>

// positions [A, capacity], capacity, axis of each frequency, inv_freq, width / 2, scale, out, count
TW_OP(rope_angles_axes, 8) {
    const int64_t capacity = a[1].i, half = a[4].i;
    const int32_t *positions = tw::ptr<int32_t>(a[0]), *axes = tw::ptr<int32_t>(a[2]);
    const float* inv_freq = tw::ptr<float>(a[3]);
    tw::Thread::Range part = t.share(tw::live(a[7]));
    for (int64_t i = part.begin; i < part.end; ++i) {
        float* out = tw::ptr<float>(a[6]) + i * 2 * half;
        for (int64_t j = 0; j < half; ++j) {
            float angle = (float)positions[axes[j] * capacity + i] * inv_freq[j];  // float32, as in rope_angles
            out[j] = (float)(a[5].f * std::cos((double)angle));
            out[half + j] = (float)(a[5].f * std::sin((double)angle));
        }
    }
}
