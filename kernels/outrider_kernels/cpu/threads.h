// A few threads that run one function together and meet at barriers inside it.
// They spin while they wait for each other, but give their core away after some microseconds: a neighbour may need it.
#pragma once

#include <sched.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Hands out 0, 1, 2, ... to whichever thread asks: one that was held up takes less.
struct alignas(64) Tickets {
    std::atomic<int64_t> next{0};

    template <class Work>
    void each(int64_t count, Work work) {
        for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) work(i);
    }
};

class Threads {
  public:
    explicit Threads(int count) : count_(count) {
        for (int i = 1; i < count; ++i) others_.emplace_back([this, i] { serve(i); });
    }

    ~Threads() {
        job_ = nullptr;
        round_.fetch_add(1, std::memory_order_release);
        round_.notify_all();
        for (auto& thread : others_) thread.join();
    }

    int count() const { return count_; }

    // job(i) on thread i of all; returns when all are done.
    void run(const std::function<void(int)>& job) {
        job_ = &job;
        round_.fetch_add(1, std::memory_order_release);
        round_.notify_all();
        job(0);
        barrier();
    }

    void barrier() {
        const uint32_t meeting = meeting_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count_) {
            arrived_.store(0, std::memory_order_relaxed);
            meeting_.store(meeting + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; meeting_.load(std::memory_order_acquire) == meeting;) {
            if (++spins < SPINS)
                relax();
            else
                sched_yield();
        }
    }

  private:
    static constexpr int SPINS = 500;

    void serve(int index) {
        for (uint32_t seen = 0;;) {
            round_.wait(seen, std::memory_order_acquire);  // asleep between passes
            seen = round_.load(std::memory_order_acquire);
            if (job_ == nullptr) return;
            (*job_)(index);
            barrier();
        }
    }

    const int count_;
    std::vector<std::thread> others_;
    const std::function<void(int)>* job_ = nullptr;
    alignas(64) std::atomic<uint32_t> round_{0};
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<uint32_t> meeting_{0};
};
