// Compiles TW_SOURCE once per instruction set, each time in its own namespace (tw::level0, level1, level2).
//
// A file of ops includes *itself* through this: outside a level it registers the ops, inside a level (TW_LEVEL is defined) it holds the
// code. Standard headers must be included before: inside a level nothing of them may be compiled, because the linker keeps one copy of an
// inline function for all, and it could be the one that needs the newest CPU.
#include "runtime.h"

#include <cmath>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

// Vectors are only passed to functions that are always inlined, so their calling convention does not matter.
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"  // GCC 12's own AVX-512 header

#define TW_LEVEL 0
#define TW_NS level0
#include "vec.h"
#include TW_SOURCE
#undef TW_LEVEL
#undef TW_NS

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define TW_LEVEL 1
#define TW_NS level1
#include "vec.h"
#include TW_SOURCE
#undef TW_LEVEL
#undef TW_NS
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,avx2"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,f16c,avx2,prefer-vector-width=512")
#endif
#define TW_LEVEL 2
#define TW_NS level2
#include "vec.h"
#include TW_SOURCE
#undef TW_LEVEL
#undef TW_NS
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#define TW_PICK(t, FUNCTION) \
    ((t).isa >= ::tw::AVX512 ? ::tw::level2::FUNCTION : (t).isa >= ::tw::AVX2 ? ::tw::level1::FUNCTION : ::tw::level0::FUNCTION)
#else
#define TW_PICK(t, FUNCTION) ::tw::level0::FUNCTION
#endif
