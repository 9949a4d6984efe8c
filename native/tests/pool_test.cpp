// The thread pool: every thread runs, none passes a barrier early, whatever the number of threads and cores.
#include "../pool.h"

#include <atomic>
#include <chrono>
#include <thread>

#include "check.h"

namespace test {

void pool() {
    using namespace cutaway;
    for (const int threads : {1, 2, 3, 5, 8}) {
        Pool pool(threads);
        check(pool.threads() == threads, "threads of a pool");
        std::vector<int> slots(static_cast<size_t>(threads) * 16, 0);  // plain memory: the barrier alone orders it
        const int rounds = 300;
        std::atomic<int> early{0};
        for (int round = 0; round < rounds; ++round) {
            pool.run([&](int thread) {
                for (int phase = 0; phase < 3; ++phase) {
                    ++slots[static_cast<size_t>(thread) * 16];
                    pool.barrier();
                    for (int other = 0; other < threads; ++other)
                        if (slots[static_cast<size_t>(other) * 16] != 3 * round + phase + 1) ++early;
                    pool.barrier();
                }
            });
            if (round % 100 == 99) std::this_thread::sleep_for(std::chrono::milliseconds(5));  // let the workers fall asleep
        }
        check(early == 0, say({{"threads", threads}}, "no thread passes a barrier early:"));
        check(slots[static_cast<size_t>(threads - 1) * 16] == 3 * rounds, "the last thread has run every time");
    }
    for (int i = 0; i < 50; ++i) {  // pools that come and go, used or not
        Pool pool(1 + i % 4);
        std::atomic<int> ran{0};
        if (i % 2) pool.run([&](int) { ++ran; });
        check(ran == (i % 2 ? pool.threads() : 0), "a pool runs each of its threads once");
    }
    check(usable_cores() >= 1, "usable cores");
}

}  // namespace test
