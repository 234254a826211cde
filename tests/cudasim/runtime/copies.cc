// The cp.async copies of every thread of the block.
#include "state.h"

namespace sim {
namespace {

constexpr int max_copies = 1024, max_groups = 64;

struct Copies {
  Copy copies[max_copies];
  int num_copies = 0, num_landed = 0;
  int groups[max_groups];  // end of each committed group, as a number of copies
  int num_groups = 0, num_landed_groups = 0;
};
Copies of_thread[max_threads];

void slide(Copies& mine) {
  const int landed = mine.num_landed, groups = mine.num_landed_groups;
  for (int i = landed; i < mine.num_copies; ++i) mine.copies[i - landed] = mine.copies[i];
  for (int i = groups; i < mine.num_groups; ++i) mine.groups[i - groups] = mine.groups[i] - landed;
  mine.num_copies -= landed, mine.num_groups -= groups;
  mine.num_landed = mine.num_landed_groups = 0;
}

}  // namespace

void record_copy(const char* where, const Copy& copy) {
  Copies& mine = of_thread[self->linear];
  if (mine.num_copies == max_copies) fail(where, "more than %d cp.async of a thread in flight", max_copies);
  mine.copies[mine.num_copies++] = copy;
}

void commit_copies(const char* where) {
  Copies& mine = of_thread[self->linear];
  if (mine.num_groups == max_groups) fail(where, "more than %d cp.async groups of a thread in flight", max_groups);
  mine.groups[mine.num_groups++] = mine.num_copies;
}

const Copy* next_landing(int keep) {
  Copies& mine = of_thread[self->linear];
  while (mine.num_groups - mine.num_landed_groups > keep) {
    if (mine.num_landed < mine.groups[mine.num_landed_groups]) return &mine.copies[mine.num_landed++];
    ++mine.num_landed_groups;
  }
  slide(mine);
  return nullptr;
}

void reset_copies() {
  for (int i = 0; i < scheduler.num_threads; ++i)
    of_thread[i].num_copies = of_thread[i].num_landed = of_thread[i].num_groups = of_thread[i].num_landed_groups = 0;
}

void check_copies_after_exit() {
  const Copies& mine = of_thread[self->linear];
  const int committed = mine.num_groups ? mine.groups[mine.num_groups - 1] : 0;
  if (mine.num_copies > committed) fail(running->name, "a thread leaves with cp.async that it never committed");
  if (mine.num_copies) fail(running->name, "a thread leaves with cp.async in flight");
}

}  // namespace sim
