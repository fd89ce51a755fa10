// The frame of the CPU op library: arguments, the team of threads, and the tape.
//
// Knows: how an op is called (the same way eagerly and from a tape) and how threads share it. Refuses to know: what ops compute.
//
// A call is [op id, argument count, arguments...] in 64-bit words; a tape is calls laid end to end, and an eager call is a tape of one.
// All threads of the team walk the tape together (SPMD); the frame puts a barrier after every op. Within an op:
//     t.share(n)            this thread's static part [begin, end) of n items
//     t.chunks(n, f, lane)  dynamic: items are handed out one by one (lanes 0..3: counters of this call, each usable once)
//     t.barrier()           for ops of several phases
// Sizes that change from step to step are read through pointers when the op runs.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace tw {

union Word {
    int64_t i;
    double f;
    void* p;
};
static_assert(sizeof(Word) == 8, "a tape word is 64 bits");

// Instruction sets, in order; an op picks the best path that is <= t.isa.
enum Isa : int { PORTABLE = 0, AVX2 = 1, AVX512 = 2 /* f bw vl dq vnni */, AVX512_BF16 = 3 };

constexpr int LANES = 4;

struct Barrier;
struct Arena;

struct Thread {
    int id;
    int count;
    int isa;
    Barrier* sync;
    Arena* arena;
    std::atomic<int64_t>* lanes;  // this call's LANES counters, zero when the call starts

    struct Range {
        int64_t begin, end;
    };
    Range share(int64_t n, int64_t multiple = 1) const {
        int64_t blocks = (n + multiple - 1) / multiple;
        int64_t begin = blocks * id / count * multiple, end = blocks * (id + 1) / count * multiple;
        return {begin < n ? begin : n, end < n ? end : n};
    }
    template <class F>
    void chunks(int64_t n, F&& body, int lane = 0) {
        for (;;) {
            int64_t item = lanes[lane].fetch_add(1, std::memory_order_relaxed);
            if (item >= n) return;
            body(item);
        }
    }
    void barrier();
    // This thread's own memory, 64-byte aligned, kept from call to call and grown when needed; one block per slot. Slot 0 holds anything;
    // ZEROED is all zeros when an op starts, and an op that writes it must leave zeros.
    static constexpr int ANYTHING = 0, MORE = 1, ZEROED = 2, SLOTS = 3;
    void* scratch(size_t bytes, int slot = ANYTHING);
};

using OpFunction = void (*)(const Word* a, Thread& t);

struct OpEntry {
    const char* name;
    int args;
    OpFunction run;
};

// Ops register themselves by name; Python asks for ids by name and checks the argument count when it records.
struct Register {
    Register(const char* name, int args, OpFunction run);
};
#define TW_OP(NAME, ARGS)                                       \
    static void op_##NAME(const ::tw::Word* a, ::tw::Thread& t); \
    static ::tw::Register register_##NAME(#NAME, ARGS, op_##NAME); \
    static void op_##NAME(const ::tw::Word* a, ::tw::Thread& t)

template <class T>
inline T* ptr(Word w) { return static_cast<T*>(w.p); }
inline int64_t live(Word w) { return *static_cast<const int32_t*>(w.p); }  // a Count

}  // namespace tw
