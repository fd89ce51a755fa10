// The team of threads and the tape runner. See runtime.h.
#include "runtime.h"

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#define TW_PAUSE() _mm_pause()
#else
#define TW_PAUSE() std::this_thread::yield()
#endif

namespace tw {

static std::vector<OpEntry>& table() {
    static std::vector<OpEntry> entries;
    return entries;
}

Register::Register(const char* name, int args, OpFunction run) { table().push_back({name, args, run}); }

using Clock = std::chrono::steady_clock;

static int64_t now_ns() { return std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now().time_since_epoch()).count(); }

// Spin briefly (an op lasts microseconds), then give the core away: on a busy machine two threads of the team may have to share a core,
// and the one who waits keeps the other off it. (Measured there: 2 us a barrier with 50 spins, 50 us with 2,000; on two free cores a
// barrier takes 0.06 us either way.) The two counters are on lines of their own: arrivals must not disturb spinners.
struct Barrier {
    static constexpr int SPINS = 100;  // about 2 microseconds
    int count;
    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<uint32_t> generation{0};
    explicit Barrier(int n) : count(n) {}
    void wait() {
        uint32_t mine = generation.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == count - 1) {
            arrived.store(0, std::memory_order_relaxed);
            generation.store(mine + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; generation.load(std::memory_order_acquire) == mine; ++spins) {
            if (spins < SPINS) TW_PAUSE();
            else std::this_thread::yield();
        }
    }
};

void Thread::barrier() {
    if (count > 1) sync->wait();
}

struct Arena {
    void* block[Thread::SLOTS] = {};
    size_t bytes[Thread::SLOTS] = {};
    ~Arena() {
        for (void* p : block) std::free(p);
    }
};

void* Thread::scratch(size_t bytes, int slot) {
    if (bytes > arena->bytes[slot]) {
        std::free(arena->block[slot]);
        size_t rounded = (bytes + 4095) / 4096 * 4096;
        arena->block[slot] = std::aligned_alloc(64, rounded);
        if (!arena->block[slot]) std::abort();  // a few MB: the process is beyond help
        if (slot == ZEROED) std::memset(arena->block[slot], 0, rounded);
        arena->bytes[slot] = rounded;
    }
    return arena->block[slot];
}

class Team {
  public:
    Team(int threads, int isa) : threads_(threads), isa_(isa), sync_(threads), arenas_(threads) {
        for (int id = 1; id < threads; ++id) workers_.emplace_back([this, id] { serve(id); });
    }
    ~Team() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stop_ = true;
            job_.fetch_add(1, std::memory_order_release);
        }
        wake_.notify_all();
        for (auto& worker : workers_) worker.join();
    }
    // times_ns: null, or one entry per call for the time that thread 0 spent on it, barrier included.
    void run(const Word* tape, int64_t calls, int64_t* times_ns) {
        std::lock_guard<std::mutex> one_at_a_time(run_);
        if (calls > capacity_) {
            capacity_ = calls;
            lanes_.reset(new std::atomic<int64_t>[calls * LANES]);
        }
        for (int64_t i = 0; i < calls * LANES; ++i) lanes_[i].store(0, std::memory_order_relaxed);
        tape_ = tape;
        calls_ = calls;
        if (threads_ > 1) {
            {
                std::lock_guard<std::mutex> lock(mutex_);
                job_.fetch_add(1, std::memory_order_release);
            }
            if (asleep_.load(std::memory_order_acquire)) wake_.notify_all();
        }
        walk(0, times_ns);
    }
    void set_isa(int isa) { isa_ = isa; }
    void set_linger(int64_t ns) { linger_ns_.store(ns, std::memory_order_relaxed); }

  private:
    void walk(int id, int64_t* times_ns) {
        Thread t{id, threads_, isa_, &sync_, &arenas_[id], nullptr};
        // Copies: after the last barrier the next run may already be writing the members.
        const Word* word = tape_;
        const int64_t calls = calls_;
        std::atomic<int64_t>* lanes = lanes_.get();
        int64_t before = times_ns ? now_ns() : 0;
        for (int64_t call = 0; call < calls; ++call) {
            const OpEntry& op = table()[word[0].i];
            t.lanes = lanes + call * LANES;
            op.run(word + 2, t);
            word += 2 + word[1].i;
            t.barrier();
            if (times_ns) {
                int64_t after = now_ns();
                times_ns[call] = after - before;
                before = after;
            }
        }
    }
    void serve(int id) {
        uint32_t seen = 0;
        for (;;) {
            // A worker lingers through the gap between two steps, and sleeps when the engine is idle. While it lingers it offers its core
            // at every turn: with as many threads as cores, the host thread that prepares the next step needs one of them.
            if (job_.load(std::memory_order_acquire) == seen) {
                const int64_t until = now_ns() + linger_ns_.load(std::memory_order_relaxed);
                do {
                    for (int spins = 0; spins < 64 && job_.load(std::memory_order_acquire) == seen; ++spins) TW_PAUSE();
                    if (job_.load(std::memory_order_acquire) != seen) break;
                    std::this_thread::yield();
                } while (now_ns() < until);
            }
            if (job_.load(std::memory_order_acquire) == seen) {
                std::unique_lock<std::mutex> lock(mutex_);
                asleep_.fetch_add(1, std::memory_order_release);
                wake_.wait(lock, [&] { return job_.load(std::memory_order_acquire) != seen; });
                asleep_.fetch_sub(1, std::memory_order_release);
            }
            seen = job_.load(std::memory_order_acquire);
            if (stop_) return;
            walk(id, nullptr);
        }
    }

    int threads_, isa_;
    Barrier sync_;
    std::vector<Arena> arenas_;
    std::vector<std::thread> workers_;
    std::mutex run_, mutex_;
    std::condition_variable wake_;
    std::atomic<uint32_t> job_{0};
    std::atomic<int> asleep_{0};
    std::atomic<int64_t> linger_ns_{300'000};
    bool stop_ = false;
    const Word* tape_ = nullptr;
    int64_t calls_ = 0, capacity_ = 0;
    std::unique_ptr<std::atomic<int64_t>[]> lanes_;
};

}  // namespace tw

extern "C" {

int tw_detect_isa() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                  __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni");
    if (avx512 && __builtin_cpu_supports("avx512bf16")) return tw::AVX512_BF16;
    if (avx512) return tw::AVX512;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return tw::AVX2;
#endif
    return tw::PORTABLE;
}

void* tw_team_new(int threads, int isa) { return new tw::Team(threads, isa); }
void tw_team_free(void* team) { delete static_cast<tw::Team*>(team); }
void tw_team_set_isa(void* team, int isa) { static_cast<tw::Team*>(team)->set_isa(isa); }
void tw_team_set_linger(void* team, int64_t ns) { static_cast<tw::Team*>(team)->set_linger(ns); }
void tw_team_run(void* team, const void* tape, int64_t calls) {
    static_cast<tw::Team*>(team)->run(static_cast<const tw::Word*>(tape), calls, nullptr);
}
void tw_team_profile(void* team, const void* tape, int64_t calls, int64_t* times_ns) {
    static_cast<tw::Team*>(team)->run(static_cast<const tw::Word*>(tape), calls, times_ns);
}

int tw_op_count() { return static_cast<int>(tw::table().size()); }
const char* tw_op_name(int id) { return tw::table()[id].name; }
int tw_op_args(int id) { return tw::table()[id].args; }
}
