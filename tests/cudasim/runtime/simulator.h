// What translated kernels ask of the simulator. `where` is always a literal: file and line of the .cu source.
//
// The simulator itself is compiled without sanitizers, so they see the kernel's own accesses to memory and none of the
// simulator's. What ThreadSanitizer must know of the order between threads it is told in rendezvous.cc and launch.cc.
#pragma once

#include <cstddef>
#include <cstdint>

namespace sim {

struct Index3 {
  uint32_t x, y, z;
};

// One cp.async between its issue and the wait that covers it.
struct Copy {
  char* to;
  const char* from;
  uint32_t num_bytes, num_source_bytes;  // the bytes behind the source's end become zero
};

// A CUDA thread, as its own code sees it.
struct Self {
  Index3 tid;
  uint32_t linear, lane, warp;
};

struct Grid {
  Index3 block, block_dim, grid_dim;
  uint32_t dynamic_shared_bytes, total_shared_bytes;
};

extern Self* self;  // the running thread
extern Grid grid;   // of the running block

[[noreturn]] void fail(const char* where, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Called at every 1,024th backward branch of a thread: lets others run, and ends a launch that spins for ever.
void spin(const char* where, uint64_t num_branches);

// ---- shared memory. Addresses are numbers of their own: a host pointer is never a valid one.
constexpr uint64_t shared_base = 4096;                     // where the .shared window begins
constexpr uint64_t generic_shared = 0x7a5a'0000'4000'0000;  // where generic addresses see that window's zero
constexpr uint64_t generic_shared_bytes = 1 << 20;

char* shared_read(const char* where, uint64_t address, uint32_t num_bytes);
char* shared_write(const char* where, uint64_t address, uint32_t num_bytes);
char* shared_update(const char* where, uint64_t address, uint32_t num_bytes);  // read and written: atomics
// A copy's target: `pending` until the copy lands, and unreadable.
char* shared_pending(const char* where, uint64_t address, uint32_t num_bytes);
void shared_landed(const char* target, uint32_t num_bytes);

// ---- cp.async: the running thread's copies, oldest first
void record_copy(const char* where, const Copy& copy);
void commit_copies(const char* where);
const Copy* next_landing(int keep);  // of all groups but the newest `keep`; null when those have landed

// ---- rendezvous of threads
void barrier(const char* where, uint32_t id, uint32_t num_threads);  // num_threads 0: the whole block
enum class Reduce { all, any, count };
uint32_t barrier_reduce(const char* where, uint32_t id, uint32_t num_threads, Reduce how, bool value);
void sync_warp(const char* where, uint32_t mask);
// Memory order of fences and atomics, for ThreadSanitizer alone.
void fence();
void before_atomic(const void* address, bool release);
void after_atomic(const void* address, bool acquire);

// ---- operations of a warp
enum class Shuffle { up, down, butterfly, index };
struct Shuffled {
  uint32_t value;
  bool in_range;
};
Shuffled shuffle(const char* where, Shuffle mode, uint32_t mask, uint32_t value, uint32_t b, uint32_t c);
uint32_t ballot(const char* where, uint32_t mask, bool value);
bool vote_all(const char* where, uint32_t mask, bool value);
bool vote_any(const char* where, uint32_t mask, bool value);
bool vote_uniform(const char* where, uint32_t mask, bool value);
uint32_t match_any(const char* where, uint32_t mask, uint64_t value);
Shuffled match_all(const char* where, uint32_t mask, uint64_t value);
enum class Fold { add, min, max, min_signed, max_signed, and_, or_, xor_ };
uint32_t fold(const char* where, Fold how, uint32_t mask, uint32_t value);
// Every lane's address to every lane.
void gather_addresses(const char* where, uint64_t address, uint64_t (&all)[32]);
enum class Narrow { f16, bf16 };
// d = a * b + c of 16x8, inner dimension 8 or 16; fragments as PTX lays them out over the lanes.
void mma(const char* where, Narrow type, int inner, float (&d)[4], const uint32_t* a, const uint32_t* b);

// ---- what a module tells of a kernel
struct SharedArray {
  uint32_t offset, num_bytes;  // num_bytes 0: the dynamic one, as long as the launch says
};
struct Kernel {
  const char* name;
  void (*run)(void** arguments);
  uint32_t num_parameters, num_arrays, max_threads;  // max_threads: 0 without __launch_bounds__
  const uint32_t* parameter_bytes;
  const SharedArray* arrays;
  uint32_t max_dynamic_shared_bytes;  // raised by sim_set_max_shared_bytes, as cuFuncSetAttribute does
};

}  // namespace sim
