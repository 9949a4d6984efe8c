#include "pool.h"

#include <fstream>
#include <set>
#include <string>
#include <utility>

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cutaway {
namespace {

constexpr int kSpins = 4000, kYields = 200;
constexpr int kSpinsCrowded = 20;  // with more threads than cores, a spinning thread keeps the one it waits for from running

inline void pause() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

Pool::Pool(int threads) : threads_(threads < 1 ? 1 : threads), spins_(threads_ > usable_cores() ? kSpinsCrowded : kSpins) {
    for (int t = 1; t < threads_; ++t) workers_.emplace_back([this, t] { loop(t); });
}

Pool::~Pool() {
    stop_ = true;
    epoch_.fetch_add(1);
    wake();
    for (std::thread& worker : workers_) worker.join();
}

void Pool::wait_for(const std::atomic<unsigned>& value, unsigned old) {
    for (int i = 0; i < spins_; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
        pause();
    }
    for (int i = 0; i < kYields; ++i) {
        if (value.load(std::memory_order_acquire) != old) return;
        std::this_thread::yield();
    }
    // A sleeper announces itself before it looks a last time; who changes the value looks for sleepers afterwards.
    // Both are sequentially consistent, so one of the two sees the other.
    sleepers_.fetch_add(1);
    {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return value.load() != old; });
    }
    sleepers_.fetch_sub(1);
}

void Pool::wake() {
    if (sleepers_.load() == 0) return;
    { const std::lock_guard<std::mutex> lock(mutex_); }
    wake_.notify_all();
}

void Pool::barrier() {
    if (threads_ == 1) return;
    const unsigned passed = passed_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1) + 1 == threads_) {
        arrived_.store(0);
        passed_.fetch_add(1);
        wake();
    } else {
        wait_for(passed_, passed);
    }
}

void Pool::loop(int thread) {
    unsigned seen = 0;
    for (;;) {
        wait_for(epoch_, seen);
        ++seen;
        if (stop_) return;
        (*work_)(thread);
        barrier();
    }
}

void Pool::run(const std::function<void(int)>& work) {
    work_ = &work;
    if (threads_ > 1) {
        epoch_.fetch_add(1);
        wake();
    }
    work(0);
    barrier();
}

int usable_cores() {
    int allowed = static_cast<int>(std::thread::hardware_concurrency());
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        allowed = CPU_COUNT(&set);
        std::set<std::pair<std::string, std::string>> cores;
        for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
            if (!CPU_ISSET(cpu, &set)) continue;
            const std::string base = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
            std::string core, package;
            std::ifstream(base + "core_id") >> core;
            std::ifstream(base + "physical_package_id") >> package;
            cores.emplace(package, core.empty() ? std::to_string(cpu) : core);
        }
        if (!cores.empty() && static_cast<int>(cores.size()) < allowed) allowed = static_cast<int>(cores.size());
    }
    std::string quota;
    double period = 0;
    std::ifstream v2("/sys/fs/cgroup/cpu.max");
    if (v2 >> quota >> period && quota != "max" && period > 0) {
        const int limit = static_cast<int>(std::stod(quota) / period + 0.5);
        if (limit < allowed) allowed = limit;
    } else {
        double us = -1;
        std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_quota_us") >> us;
        std::ifstream("/sys/fs/cgroup/cpu/cpu.cfs_period_us") >> period;
        if (us > 0 && period > 0 && static_cast<int>(us / period + 0.5) < allowed) allowed = static_cast<int>(us / period + 0.5);
    }
#endif
    return allowed < 1 ? 1 : allowed;
}

}  // namespace cutaway
