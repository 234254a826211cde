// Barriers of the block, rendezvous of a warp's lanes, and the order that fences and atomics make.
#include "rendezvous.h"

#include <cstring>

namespace sim {
namespace {

struct Results {
  uint32_t all, any, count;
};

struct Barrier {
  int num_arrived = 0, num_expected = 0;
  bool has_count = false;
  const char* where = "";
  const void* sync = nullptr;
  Results results, last_results;
};

struct Meeting {
  uint32_t mask = 0, arrived = 0;
  const char* where = "";
  const char* what = "";
  const void* sync = nullptr;
  void* payload[warp_size];
};

constexpr int meetings_per_warp = 8, max_atomics = 16;

// What ThreadSanitizer is told of a thread's fences: an atomic before an acquiring fence, or after a releasing one.
struct Fences {
  bool has_fenced = false;
  const void* atomics[max_atomics];
  unsigned num_atomics = 0;
};

Barrier barriers[max_barriers];
Meeting meetings[max_warps][meetings_per_warp];
Fences fences[max_threads];
char syncs[1 << 16];
unsigned num_syncs = 0;

bool is_same_place(const char* a, const char* b) { return a == b || std::strcmp(a, b) == 0; }

// The meeting of this warp that has begun for `mask`, or a free one.
Meeting& meeting_of(const char* where, const char* what, uint32_t mask) {
  Meeting* found = nullptr;
  for (Meeting& meeting : meetings[self->warp]) {
    if (!meeting.arrived) {
      if (!found) found = &meeting;
    } else if (meeting.mask == mask) {
      if (!is_same_place(meeting.where, where) || !is_same_place(meeting.what, what))
        fail(where, "lanes meet in different warp operations: %s here, %s at %s", what, meeting.what, meeting.where);
      return meeting;
    } else if (meeting.mask & mask) {
      fail(where, "overlapping masks: 0x%08x here, 0x%08x in %s at %s", mask, meeting.mask, meeting.what,
           meeting.where);
    }
  }
  if (!found) fail(where, "too many warp operations at once");
  found->mask = mask, found->where = where, found->what = what, found->sync = nullptr;
  return *found;
}

uint32_t lanes_of_warp() {
  const int num_lanes = scheduler.num_threads - static_cast<int>(self->warp) * warp_size;
  return num_lanes >= warp_size ? ~0u : (1u << num_lanes) - 1;
}

}  // namespace

const void* fresh_sync() { return &syncs[num_syncs++ % sizeof syncs]; }

void set_up_rendezvous() {
  for (Barrier& barrier : barriers) barrier.num_arrived = 0;
  for (auto& warp : meetings)
    for (Meeting& meeting : warp) meeting.arrived = 0;
  for (Fences& mine : fences) mine.has_fenced = false, mine.num_atomics = 0;
}

void check_barriers_after_exit() {
  for (const Barrier& barrier : barriers)
    if (barrier.num_arrived && !barrier.has_count)
      fail(running->name, "a thread leaves the kernel while others wait at the barrier of %s", barrier.where);
}

uint32_t barrier_reduce(const char* where, uint32_t id, uint32_t num_threads, Reduce how, bool value) {
  if (id >= max_barriers) fail(where, "no barrier %u", id);
  if (num_threads % warp_size || num_threads > static_cast<uint32_t>(scheduler.num_threads))
    fail(where, "a barrier of %u threads in a block of %d", num_threads, scheduler.num_threads);
  Barrier& b = barriers[id];
  const int expected = num_threads ? static_cast<int>(num_threads) : scheduler.num_threads;
  if (b.num_arrived == 0) {
    b.where = where, b.num_expected = expected, b.has_count = num_threads != 0, b.sync = fresh_sync();
    b.results = {1, 0, 0};
  } else if (b.num_expected != expected) {
    fail(where, "threads give barrier %u different counts: %d here, %d at %s", id, expected, b.num_expected, b.where);
  } else if (!b.has_count && !is_same_place(b.where, where)) {
    fail(where, "threads meet in different barriers: here and %s", b.where);
  }
  if (!num_threads && scheduler.num_alive < scheduler.num_threads)
    fail(where, "a barrier of the whole block after a thread has left the kernel");
  const void* sync = b.sync;
  b.results = {b.results.all & value, b.results.any | value, b.results.count + value};
  release(sync);
  Fiber& me = *scheduler.current;
  me.where = where, me.what = "a barrier", me.barrier = &b;
  me.waiting = Waiting::at_barrier;
  if (++b.num_arrived == b.num_expected) {
    b.num_arrived = 0;
    b.last_results = b.results;
    for (int i = 0; i < scheduler.num_threads; ++i) {
      Fiber& other = scheduler.fibers[i];
      if (other.waiting == Waiting::at_barrier && other.barrier == &b) make_ready(other);
    }
  }
  run_others();
  acquire(sync);
  return how == Reduce::all ? b.last_results.all : how == Reduce::any ? b.last_results.any : b.last_results.count;
}

void barrier(const char* where, uint32_t id, uint32_t num_threads) {
  barrier_reduce(where, id, num_threads, Reduce::all, true);
}

void meet_in_warp(const char* where, const char* what, uint32_t mask, void* payload,
                  void (*compute)(void* const (&lanes)[warp_size]), bool orders_memory) {
  mask &= lanes_of_warp();
  if (!(mask >> self->lane & 1)) fail(where, "%s: the calling lane is outside its own mask 0x%08x", what, mask);
  Meeting& meeting = meeting_of(where, what, mask);
  if (orders_memory && !meeting.sync) meeting.sync = fresh_sync();
  const void* sync = meeting.sync;
  meeting.arrived |= 1u << self->lane;
  meeting.payload[self->lane] = payload;
  if (orders_memory) release(sync);
  Fiber& me = *scheduler.current;
  me.where = where, me.what = what;
  me.waiting = Waiting::in_warp;
  if (meeting.arrived == mask) {
    void* lanes[warp_size];
    for (int i = 0; i < warp_size; ++i) lanes[i] = mask >> i & 1 ? meeting.payload[i] : nullptr;
    compute(lanes);
    meeting.arrived = 0;
    for (uint32_t i = 0; i < warp_size; ++i)
      if (mask >> i & 1) make_ready(scheduler.fibers[self->warp * warp_size + i]);
  }
  run_others();
  if (orders_memory) acquire(sync);
}

void sync_warp(const char* where, uint32_t mask) {
  char nothing;
  meet_in_warp(where, "bar.warp.sync", mask, &nothing, [](void* const(&)[warp_size]) {}, true);
}

uint32_t full_warp(const char* where, const char* what) {
  if (lanes_of_warp() != ~0u) fail(where, "%s needs a full warp; the block's last one has fewer threads", what);
  return ~0u;
}

void fence() {
  Fences& mine = fences[self->linear];
  mine.has_fenced = true;
  for (unsigned i = 0; i < mine.num_atomics && i < max_atomics; ++i) acquire(mine.atomics[i]);
}

void before_atomic(const void* address, bool releases) {
  if (releases || fences[self->linear].has_fenced) release(address);
}

void after_atomic(const void* address, bool acquires) {
  if (acquires) acquire(address);
  Fences& mine = fences[self->linear];
  mine.atomics[mine.num_atomics++ % max_atomics] = address;
}

}  // namespace sim
