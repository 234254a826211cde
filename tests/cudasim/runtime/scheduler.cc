// Fibers: one per CUDA thread, switched without the kernel's help, blocks one after another.
#include <sys/mman.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>

#include "state.h"

#if !defined(__x86_64__)
#error "the context switch is written for x86-64"
#endif

namespace sim {

Self* self = nullptr;
Grid grid{};
Scheduler scheduler;
std::string failure;
const Kernel* running = nullptr;

extern "C" void sim_switch(void** save_stack_pointer, void* load_stack_pointer);
__asm__(
    ".text\n.type sim_switch,@function\nsim_switch:\n"
    "push %rbp\npush %rbx\npush %r12\npush %r13\npush %r14\npush %r15\n"
    "mov %rsp,(%rdi)\nmov %rsi,%rsp\n"
    "pop %r15\npop %r14\npop %r13\npop %r12\npop %rbx\npop %rbp\nret\n");

namespace {

struct Launcher {  // the stack that sim_launch runs on
  void* stack_pointer = nullptr;
  void* tsan = nullptr;
  void* asan_fake_stack = nullptr;
  const void* bottom = nullptr;
  size_t num_bytes = 0;
};
Launcher launcher;
void** kernel_arguments = nullptr;
char launch_begin, launch_end;  // what ThreadSanitizer orders a launch by

// nullptr stands for the launcher.
void jump(Fiber* from, Fiber* to) {
  scheduler.current = to;
  self = to ? &to->self : nullptr;
#if defined(SIM_ADDRESS)
  const bool is_last_time = from && (from->waiting == Waiting::done || scheduler.has_failed);
  void** fake_stack = from ? &from->asan_fake_stack : &launcher.asan_fake_stack;
  __sanitizer_start_switch_fiber(is_last_time ? nullptr : fake_stack, to ? to->stack : launcher.bottom,
                                 to ? stack_bytes : launcher.num_bytes);
#endif
#if defined(SIM_THREAD)
  __tsan_switch_to_fiber(to ? to->tsan : launcher.tsan, __tsan_switch_to_fiber_no_sync);
#endif
  sim_switch(from ? &from->stack_pointer : &launcher.stack_pointer, to ? to->stack_pointer : launcher.stack_pointer);
#if defined(SIM_ADDRESS)
  __sanitizer_finish_switch_fiber(from ? from->asan_fake_stack : launcher.asan_fake_stack, nullptr, nullptr);
#endif
}

std::string waiting_threads() {
  std::string text;
  for (int i = 0, shown = 0; i < scheduler.num_threads && shown < 6; ++shown) {
    const Fiber& first = scheduler.fibers[i];
    int end = i + 1;
    while (end < scheduler.num_threads && scheduler.fibers[end].waiting == first.waiting &&
           scheduler.fibers[end].where == first.where)
      ++end;
    if (first.waiting == Waiting::at_barrier || first.waiting == Waiting::in_warp) {
      char line[400];
      std::snprintf(line, sizeof line, "\n  threads %d to %d wait in %s at %s", i, end - 1, first.what, first.where);
      text += line;
    }
    i = end;
  }
  return text;
}

extern "C" void sim_fiber_main() {
#if defined(SIM_ADDRESS)
  const void* bottom;
  size_t num_bytes;
  __sanitizer_finish_switch_fiber(nullptr, &bottom, &num_bytes);
  if (!launcher.bottom) launcher.bottom = bottom, launcher.num_bytes = num_bytes;
#endif
  acquire(&launch_begin);
  running->run(kernel_arguments);
  Fiber& me = *scheduler.current;
  check_copies_after_exit();
  release(&launch_end);
  me.waiting = Waiting::done;
  --scheduler.num_alive;
  check_barriers_after_exit();
  run_others();
  std::abort();
}

struct Stack {
  char* memory = nullptr;
  void* tsan = nullptr;
};

// Stacks, and the threads that ThreadSanitizer knows them by. Blocks take turns with several sets: with one set, thread
// i of a block would be ordered behind thread i of the block before, and after a barrier so would be all the others.
constexpr int max_sets = 8, num_stacks = 2 * max_threads;
Stack stacks[num_stacks];
int num_blocks_run = 0;

int first_stack() {
#if defined(SIM_THREAD)
  const int num_sets = std::min(max_sets, num_stacks / scheduler.num_threads);
  return num_blocks_run++ % num_sets * scheduler.num_threads;
#else
  return 0;
#endif
}

void set_up_stack(Stack& stack) {
  stack.memory = static_cast<char*>(
      mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  mprotect(stack.memory, 4096, PROT_NONE);  // a stack that overflows stops here
#if defined(SIM_THREAD)
  stack.tsan = __tsan_create_fiber(0);
#endif
}

void set_up_fiber(Fiber& fiber, int i, Stack& stack) {
  const Index3 dim = grid.block_dim;
  const uint32_t n = static_cast<uint32_t>(i);
  fiber.self = {{n % dim.x, n / dim.x % dim.y, n / (dim.x * dim.y)}, n, n % warp_size, n / warp_size};
  if (!stack.memory) set_up_stack(stack);
  fiber.stack = stack.memory, fiber.tsan = stack.tsan;
  // The frame that sim_switch returns into: six registers, sim_fiber_main, and nothing to return to.
  void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(fiber.stack) + stack_bytes) & ~uintptr_t{63}) - 8;
  *--top = nullptr;
  *--top = reinterpret_cast<void*>(&sim_fiber_main);
  fiber.stack_pointer = top - 6;
}

// After a failure: frames that never return leave marks in the sanitizers' records of the stacks.
void forget_stacks() {
  for (Stack& stack : stacks) {
    if (!stack.memory) continue;
#if defined(SIM_ADDRESS)
    __asan_unpoison_memory_region(stack.memory, stack_bytes);
#endif
#if !defined(SIM_THREAD)  // which would see the launcher race with the fibers that were left alone
    munmap(stack.memory, stack_bytes);
#endif
    stack = {};
  }
}

}  // namespace

void fail(const char* where, const char* format, ...) {
  if (scheduler.has_failed) std::abort();
  char text[1000];
  int n = std::snprintf(text, sizeof text, "%s: kernel %s, block (%u,%u,%u)", where, running->name, grid.block.x,
                        grid.block.y, grid.block.z);
  if (self) n += std::snprintf(text + n, sizeof text - n, ", thread %u", self->linear);
  n += std::snprintf(text + n, sizeof text - n, ": ");
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(text + n, sizeof text - n, format, arguments);
  va_end(arguments);
  failure = text + waiting_threads();
  scheduler.has_failed = true;
  if (scheduler.current) jump(scheduler.current, nullptr);  // this fiber and the others never run again
  std::abort();
}

uint64_t random_below(uint64_t bound) {
  uint64_t& x = scheduler.random;
  x ^= x << 13, x ^= x >> 7, x ^= x << 17;
  return x % bound;
}

void make_ready(Fiber& fiber) {
  Scheduler& s = scheduler;
  constexpr unsigned last = 2 * max_threads - 1;
  fiber.waiting = Waiting::no;
  s.ready[s.tail++ & last] = static_cast<int>(fiber.self.linear);
  if (!s.is_shuffled) return;
  int& mine = s.ready[(s.tail - 1) & last];
  int& other = s.ready[(s.head + random_below(s.tail - s.head)) & last];
  const int swapped = mine;
  mine = other, other = swapped;
}

void run_others() {
  Scheduler& s = scheduler;
  Fiber* me = s.current;
  if (s.head == s.tail) return jump(me, nullptr);
  Fiber* next = &s.fibers[s.ready[s.head++ & (2 * max_threads - 1)]];
  if (next != me) jump(me, next);
}

void spin(const char* where, uint64_t num_branches) {
  if (num_branches >= scheduler.max_branches)
    fail(where, "still looping after %llu backward branches: it waits for another block, or for ever",
         static_cast<unsigned long long>(num_branches));
  make_ready(*scheduler.current);
  run_others();
}

bool run_block(void** arguments) {
  Scheduler& s = scheduler;
  kernel_arguments = arguments;
  s.num_threads = s.num_alive = static_cast<int>(grid.block_dim.x * grid.block_dim.y * grid.block_dim.z);
  s.head = s.tail = 0, s.has_failed = false, s.current = nullptr, self = nullptr;
  launcher.bottom = nullptr;
  set_up_rendezvous();
  reset_copies();
#if defined(SIM_THREAD)
  launcher.tsan = __tsan_get_current_fiber();
#endif
  const int first = first_stack();
  for (int i = 0; i < s.num_threads; ++i) set_up_fiber(s.fibers[i], i, stacks[first + i]);
  for (int i = 0; i < s.num_threads; ++i) make_ready(s.fibers[i]);
  jump(nullptr, &s.fibers[s.ready[s.head++ & (2 * max_threads - 1)]]);
  if (!s.has_failed && s.num_alive) {
    s.has_failed = true;
    char text[300];
    std::snprintf(text, sizeof text, "deadlock: kernel %s, block (%u,%u,%u): threads that others wait for never arrive",
                  running->name, grid.block.x, grid.block.y, grid.block.z);
    failure = text + waiting_threads();
  }
  if (s.has_failed) forget_stacks();
  return !s.has_failed;
}

void begin_launch() { release(&launch_begin); }
void finish_launch() { acquire(&launch_end); }

}  // namespace sim
