#include "attention_plan.h"

#include <algorithm>
#include <thread>

namespace chairlift {
namespace {

constexpr int64_t kTasksPerThread = 4;
constexpr int64_t kGroupsPerShare = 2;  // of a thread's share of what is left

int64_t num_threads() {
  static const int64_t count = std::max(1u, std::thread::hardware_concurrency());
  return count;
}

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

int32_t first_split(const AttentionUnit& unit) { return static_cast<int32_t>(unit.kv_begin / kSplitTokens); }

int32_t num_splits(const AttentionUnit& unit) {
  return static_cast<int32_t>(divide_up(unit.kv_end, kSplitTokens)) - first_split(unit);
}

// Rough, for one core with wide vectors: converting a tile of K and V, and then each row's two products.
int64_t unit_ns(const AttentionCall& call, const AttentionUnit& unit) {
  const int64_t num_tiles = divide_up(unit.kv_end, kTileTokens) - unit.kv_begin / kTileTokens;
  return num_tiles * call.head_dim * (12 + 5 * unit.num_rows / 2);
}

int64_t partial_floats(const AttentionCall& call, const AttentionUnit& unit) {
  return static_cast<int64_t>(num_splits(unit)) * unit.num_rows * (call.padded_dim + 2);
}

void add_preparation(const AttentionCall& call, AttentionPreparation tokens, AttentionPlan* plan) {
  plan->preparations.push_back(tokens);
  plan->prepare_ns += tokens.num_tokens * tokens.num_kv_heads * (call.group_size + 2) * call.head_dim / 4;
}

// Tokens whose keys share a group, and so cache lines, are prepared together.
void add_preparations(const AttentionCall& call, int32_t sequence, AttentionPlan* plan) {
  const int64_t end_token = call.cu_seqlens[sequence + 1];
  const int64_t first_position = call.context_lens[sequence] - (end_token - call.cu_seqlens[sequence]);
  int64_t in_group = first_position % kKeyGroup;
  for (int64_t token = call.cu_seqlens[sequence]; token < end_token; in_group = 0) {
    const int64_t count = std::min(kKeyGroup - in_group, end_token - token);
    add_preparation(call, {token, count, 0, call.num_kv_heads}, plan);
    token += count;
  }
}

void add_units(const AttentionCall& call, int32_t sequence, AttentionPlan* plan) {
  const int64_t num_queries = call.cu_seqlens[sequence + 1] - call.cu_seqlens[sequence];
  const int64_t first_position = call.context_lens[sequence] - num_queries;
  const int64_t num_rows = num_queries * call.group_size;
  if (num_rows == 0) return;
  // From the last, which see most: short tasks at the end let all threads finish together.
  for (int64_t row = (num_rows - 1) / call.tile_rows * call.tile_rows; row >= 0; row -= call.tile_rows) {
    const int64_t count = std::min<int64_t>(call.tile_rows, num_rows - row);
    AttentionUnit unit{};
    unit.sequence = sequence;
    unit.first_row = row;
    unit.num_rows = static_cast<int32_t>(count);
    unit.kv_end = first_position + (row + count - 1) / call.group_size + 1;
    const int64_t oldest_position = first_position + row / call.group_size;
    if (call.sliding_window > 0) unit.kv_begin = std::max<int64_t>(0, oldest_position + 1 - call.sliding_window);
    unit.num_tasks = 1;
    unit.prepares = count == num_rows;
    for (unit.kv_head = 0; unit.kv_head < call.num_kv_heads; ++unit.kv_head) plan->units.push_back(unit);
    plan->attend_ns += call.num_kv_heads * unit_ns(call, unit);
  }
  if (num_rows > call.tile_rows) add_preparations(call, sequence, plan);
}

// Cuts unit `index` if it is longer than `fair_ns` and its partials fit; they are taken off the workspace.
void add_tasks(const AttentionCall& call, size_t index, int64_t fair_ns, float** workspace, int64_t* workspace_floats,
               AttentionPlan* plan) {
  AttentionUnit& unit = plan->units[index];
  const int32_t splits = num_splits(unit);
  int32_t parts = static_cast<int32_t>(std::min<int64_t>(divide_up(unit_ns(call, unit), fair_ns), splits));
  const int64_t floats = partial_floats(call, unit);
  if (num_threads() == 1 || floats > *workspace_floats) parts = 1;
  if (parts > 1) {
    unit.partials = *workspace;
    *workspace += floats;
    *workspace_floats -= floats;
    if (unit.prepares) {
      const int64_t first_token = call.cu_seqlens[unit.sequence];
      const int64_t num_tokens = call.cu_seqlens[unit.sequence + 1] - first_token;
      add_preparation(call, {first_token, num_tokens, unit.kv_head, 1}, plan);
      unit.prepares = false;
    }
  }
  const int32_t splits_per_task = static_cast<int32_t>(divide_up(splits, parts));
  unit.num_tasks = static_cast<int32_t>(divide_up(splits, splits_per_task));
  plan->tasks_left[index].store(unit.num_tasks, std::memory_order_relaxed);
  for (int32_t done = 0; done < splits; done += splits_per_task) {
    const int32_t count = std::min(splits_per_task, splits - done);
    plan->tasks.push_back({static_cast<int32_t>(index), first_split(unit) + done, count});
  }
}

// A group's tasks follow each other on one thread; only its first tile comes unfetched. Groups get ever shorter, so
// that threads finish together.
void add_groups(const AttentionCall& call, AttentionPlan* plan) {
  int64_t left_ns = plan->attend_ns;
  int64_t sum_ns = 0;
  for (size_t i = 0; i < plan->tasks.size(); ++i) {
    const AttentionTask& task = plan->tasks[i];
    const AttentionUnit& unit = plan->units[static_cast<size_t>(task.unit)];
    sum_ns += unit_ns(call, unit) * task.num_splits / num_splits(unit);
    if (sum_ns >= left_ns / (kGroupsPerShare * num_threads()) || i + 1 == plan->tasks.size()) {
      plan->group_ends.push_back(i + 1);
      left_ns -= sum_ns;
      sum_ns = 0;
    }
  }
}

}  // namespace

int64_t task_start(const AttentionUnit& unit, const AttentionTask& task) {
  return std::max(unit.kv_begin / kTileTokens * kTileTokens, int64_t{task.first_split} * kSplitTokens);
}

int32_t attention_tile_rows(int32_t padded_dim) { return std::min(kMaxTileRows, kMaxTileFloats / padded_dim / 6 * 6); }

void plan_attention(const AttentionCall& call, float* workspace, int64_t workspace_floats, AttentionPlan* plan) {
  plan->preparations.clear();
  plan->units.clear();
  plan->tasks.clear();
  plan->group_ends.clear();
  plan->prepare_ns = 0;
  plan->attend_ns = 0;
  for (int32_t sequence = static_cast<int32_t>(call.num_seqs); sequence-- > 0;) add_units(call, sequence, plan);
  const int64_t num_used = call.cu_seqlens[call.num_seqs];
  if (num_used < call.num_tokens) {  // padding: zeros in `out`
    add_preparation(call, {num_used, call.num_tokens - num_used, 0, call.num_kv_heads}, plan);
  }
  if (plan->tasks_left_capacity < plan->units.size()) {
    plan->tasks_left_capacity = 2 * plan->units.size();
    plan->tasks_left = std::make_unique<std::atomic<int32_t>[]>(plan->tasks_left_capacity);
  }
  const int64_t fair_ns = plan->attend_ns / (kTasksPerThread * num_threads()) + 1;
  for (size_t i = 0; i < plan->units.size(); ++i) add_tasks(call, i, fair_ns, &workspace, &workspace_floats, plan);
  add_groups(call, plan);
}

}  // namespace chairlift

#define CHAIRLIFT_EXPORT extern "C" __attribute__((visibility("default")))

// Floats worth giving PagedAttention as `workspace`. Needed only when long sequences are few: then a unit's KV range is
// shared between threads, and each split of 512 tokens leaves num_rows * (padded head_dim + 2) floats there. At most
// 4 * threads units are cut, and no more than there are. A smaller workspace, even an empty one, changes no result; it
// only leaves units whole. At most 4 Mi floats (16 MiB) are asked for; -1 when an argument is below 1.
CHAIRLIFT_EXPORT int64_t chairlift_attention_workspace_floats(int64_t max_tokens, int64_t max_seqs, int64_t num_heads,
                                                              int64_t num_kv_heads, int64_t head_dim,
                                                              int64_t max_context) {
  using namespace chairlift;
  if (std::min({max_tokens, max_seqs, num_heads, num_kv_heads, head_dim, max_context}) < 1) return -1;
  constexpr int64_t kMost = int64_t{4} << 20;
  const int64_t padded_dim = divide_up(std::min<int64_t>(head_dim, kMaxHeadDim), 16) * 16;
  const int64_t tile_rows = attention_tile_rows(static_cast<int32_t>(padded_dim));
  const int64_t group_rows = std::min(divide_up(num_heads, num_kv_heads), kMost) * std::min(max_tokens, kMost);
  const int64_t rows = std::min(tile_rows, group_rows);
  const int64_t units = num_kv_heads * (divide_up(group_rows, tile_rows) + std::min(max_seqs, max_tokens));
  const int64_t splits = divide_up(max_context, kSplitTokens);
  if (splits < 2) return 1;
  const int64_t per_unit = std::min(splits, kMost) * rows * (padded_dim + 2);
  return std::min(kMost, std::min(units, kTasksPerThread * num_threads()) * per_unit);
}
