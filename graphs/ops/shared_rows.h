// Rows that the tasks of one fork prepare together before each goes on with work that needs all of them.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>

#include "isa.h"

namespace chairlift {

// Whoever comes takes rows that nobody has taken yet, and then waits for the last ones that other threads are at work
// on. Nobody waits for a thread that has not begun: the tasks may run in any order, and on one thread alone.
class SharedRows {
 public:
  // Rows are taken in runs of `run`.
  SharedRows(int64_t num_rows, int64_t run) : num_rows_(num_rows), run_(run) {}

  // Returns when body(row) has been called for every row, each by one thread; what those calls wrote is visible then.
  template <class Body>
  void finish(const Body& body) {
    if (is_finished()) return;
    for (int64_t first; (first = next_.fetch_add(run_, std::memory_order_relaxed)) < num_rows_;) {
      const int64_t end = std::min(first + run_, num_rows_);
      for (int64_t row = first; row < end; ++row) body(row);
      num_done_.fetch_add(end - first, std::memory_order_release);
    }
    for (int spins = 0; !is_finished(); ++spins) {
      if (spins < kMaxSpins) {
        pause();
      } else {
        std::this_thread::yield();  // the other thread may need this core
      }
    }
  }

 private:
  static constexpr int kMaxSpins = 2'000;  // some 50 us, more than a run of rows takes
  static constexpr size_t kLineBytes = 64;

  bool is_finished() const { return num_done_.load(std::memory_order_acquire) == num_rows_; }

  static void pause() {
#if CHAIRLIFT_X86
    __builtin_ia32_pause();
#elif CHAIRLIFT_ARM
    __asm__ volatile("yield");
#endif
  }

  const int64_t num_rows_;
  const int64_t run_;
  alignas(kLineBytes) std::atomic<int64_t> next_{0};
  alignas(kLineBytes) std::atomic<int64_t> num_done_{0};
};

}  // namespace chairlift
