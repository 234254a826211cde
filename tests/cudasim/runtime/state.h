// The simulator's own state: one launch at a time, on the thread that launches.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "simulator.h"

#if defined(SIM_ADDRESS)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#if defined(SIM_THREAD)
#include <sanitizer/tsan_interface.h>
extern "C" void AnnotateIgnoreWritesBegin(const char* file, int line);
extern "C" void AnnotateIgnoreWritesEnd(const char* file, int line);
#endif

namespace sim {

constexpr int max_threads = 1024, max_warps = 32, warp_size = 32, max_barriers = 16;
constexpr size_t stack_bytes = 128 << 10;

enum class Waiting : uint8_t { no, at_barrier, in_warp, done };

// A fiber: a CUDA thread with the stack that it runs on.
struct Fiber {
  Self self{};
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  void* tsan = nullptr;  // what ThreadSanitizer takes for a thread
  void* asan_fake_stack = nullptr;
  Waiting waiting = Waiting::done;
  const char* where = "";  // of the rendezvous it waits in
  const char* what = "";
  const void* barrier = nullptr;  // that it waits at
};

struct Scheduler {
  Fiber fibers[max_threads];
  int num_threads = 0, num_alive = 0;
  int ready[2 * max_threads];  // a ring
  unsigned head = 0, tail = 0;
  Fiber* current = nullptr;
  uint64_t random = 1;
  bool is_shuffled = false;
  uint64_t max_branches = 1ull << 26;
  bool has_failed = false;
};

extern Scheduler scheduler;
extern std::string failure;  // why the last launch failed
extern const Kernel* running;

uint64_t random_below(uint64_t bound);

// Puts a fiber among the ready ones: at the end, or anywhere if shuffled.
void make_ready(Fiber& fiber);
// Gives up the processor; the caller has said what it waits for.
void run_others();
// Runs `kernel` on every thread of the current block. False if it failed.
bool run_block(void** arguments);

// Tell ThreadSanitizer that all threads come after what the launcher did before, and the launcher after all threads.
void begin_launch();
void finish_launch();

// Between these two a segmentation fault of a kernel fails the launch; not with a sanitizer.
void watch_wild_addresses();
void ignore_wild_addresses();

void reset_copies();
void check_copies_after_exit();
void set_up_rendezvous();
void check_barriers_after_exit();

// Shared memory of a block.
void set_up_shared(const Kernel& kernel, uint32_t dynamic_bytes);
void tear_down_shared();

#if defined(SIM_THREAD)
inline void release(const void* sync) { __tsan_release(const_cast<void*>(sync)); }
inline void acquire(const void* sync) { __tsan_acquire(const_cast<void*>(sync)); }
// Memory allocated meanwhile has no history, and freeing it is no access that could race.
struct Unwatched {
  Unwatched() { AnnotateIgnoreWritesBegin(__FILE__, __LINE__); }
  ~Unwatched() { AnnotateIgnoreWritesEnd(__FILE__, __LINE__); }
};
#else
inline void release(const void*) {}
inline void acquire(const void*) {}
struct Unwatched {
  Unwatched() {}
};
#endif
// An address that orders exactly one rendezvous: one used again would order threads that nothing orders, and hide
// races.
const void* fresh_sync();

}  // namespace sim
