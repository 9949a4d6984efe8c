// A persistent pool of threads that run one function together, with a barrier between its phases.
//
// Waiting is bounded spinning, then yielding, then sleeping: quick while the machine is free, and harmless when it is
// shared or when there are more threads than cores.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

namespace cutaway {

class Pool {
   public:
    explicit Pool(int threads);
    ~Pool();
    Pool(const Pool&) = delete;
    Pool& operator=(const Pool&) = delete;

    int threads() const { return threads_; }
    // Runs work(thread) on every thread, the caller being thread 0, and returns when all are done. Not reentrant.
    void run(const std::function<void(int)>& work);
    // Called by every thread inside `work`: none passes before all have come.
    void barrier();

   private:
    void wait_for(const std::atomic<unsigned>& value, unsigned not_equal_to);
    void wake();
    void loop(int thread);

    const int threads_, spins_;
    alignas(64) std::atomic<unsigned> epoch_{0};    // work given out so far
    alignas(64) std::atomic<int> arrived_{0};       // threads at the current barrier
    alignas(64) std::atomic<unsigned> passed_{0};   // barriers passed so far
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<bool> stop_{false};
    const std::function<void(int)>* work_ = nullptr;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::vector<std::thread> workers_;
};

// Threads worth using: processors this process may run on, within the cgroup's quota; one per physical core.
int usable_cores();

}  // namespace cutaway
