// Cuts one call of PagedAttention into tasks of bounded length.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include "paged_attention.h"

namespace chairlift {

// Grows to the largest call seen and stays: steady state allocates nothing.
struct AttentionPlan {
  std::vector<AttentionPreparation> preparations;
  std::vector<AttentionUnit> units;
  std::vector<AttentionTask> tasks;
  std::vector<size_t> group_ends;  // tasks in a row that one thread takes together, so that it can prefetch
  std::unique_ptr<std::atomic<int32_t>[]> tasks_left;  // per unit; used for units of several tasks
  size_t tasks_left_capacity = 0;
  int64_t prepare_ns = 0;  // estimates for one thread: of all preparations
  int64_t attend_ns = 0;   // and of all tasks
};

// Fills `plan`. A unit that is much longer than its fair share is cut into several tasks when `workspace` has room for
// its partials; results do not depend on that. A sequence whose new tokens fit one uncut unit per kv head (every
// decoding one) needs no preparation: that saves a fork and join, and relies on no other sequence reading a slot that
// is written now.
void plan_attention(const AttentionCall& call, float* workspace, int64_t workspace_floats, AttentionPlan* plan);

// Position of the first tile that a task reads.
int64_t task_start(const AttentionUnit& unit, const AttentionTask& task);

// Rows that one unit may have at this (padded) head dimension.
int32_t attention_tile_rows(int32_t padded_dim);

}  // namespace chairlift
