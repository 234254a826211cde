// The PagedAttention kernels for one instruction set; the including file names it (see simd.h).
//
// Per unit: queries (already rotated and scaled) times K^T, tile by tile, online softmax, times V. K lies by channels, 16
// tokens at a time, so both products have tokens, then channels, along their vectors. Prefill and decode differ in how
// many rows a unit has: many rows share a converted tile, few use it once, in registers. Every sum is the same chain
// either way.
//
// What bounds it. Decode: reading KV. Prefill: multiply-adds. Versions, on a 2-core Zen 4,
// microseconds of one core per call (16 sequences of 512 tokens, 9 query and 3 kv heads of 64, float16, KV in cache):
//   K and V converted into scratch, then multiplied               510
//   K transposed as 16-bit words, V converted as it is read        410
//   row pointers out of the inner loop                             384
//   queries multiplied with K's columns as they are transposed     352
// With KV in memory the first took 690; the last takes 545, and 510 where the buffer lies on huge pages.
// On Zen 5, contexts that end in a short tile (16 sequences of 205 tokens): 0.80 of the time since the following task's
// first tile is fetched during the tile before; until then it was fetched during the short one, and mostly missed.
// There too, sequences of 256 tokens, K by channels in the buffer itself and rows looked up four at a time: 0.60 of the
// time in cache, 0.77 in memory. Until then K was transposed as it was converted.
// On AVX2 (Zen 3), where up to three rows share four vectors of V instead of two, 0.91 of the time before.
#include <utility>

#include "paged_attention.h"
#include "simd.h"

#define CHAIRLIFT_INLINE_MEMBER inline __attribute__((always_inline))

namespace chairlift::CHAIRLIFT_SIMD_NS {
namespace {

#include "attention_multiply.inl"
#include "attention_tile.inl"
// (these two build on the two above)
#include "attention_prepare.inl"
#include "attention_softmax.inl"

void locate_rows(const AttentionCall& call, const AttentionUnit& unit, UnitRows* rows) {
  const int64_t first_token = call.cu_seqlens[unit.sequence];
  const int64_t num_queries = call.cu_seqlens[unit.sequence + 1] - first_token;
  const int64_t first_position = call.context_lens[unit.sequence] - num_queries;
  rows->count = unit.num_rows;
  for (int r = 0; r < unit.num_rows; ++r) {
    const int64_t row = unit.first_row + r;
    const int64_t token = row / call.group_size;
    const int64_t head = static_cast<int64_t>(unit.kv_head) * call.group_size + row % call.group_size;
    rows->outs[r] = call.out + ((first_token + token) * call.num_heads + head) * call.head_dim;
    rows->queries[r] = rows->outs[r];
    rows->end[r] = first_position + token + 1;
    const int64_t begin = call.sliding_window > 0 ? rows->end[r] - call.sliding_window : 0;
    rows->begin[r] = begin > 0 ? begin : 0;
  }
}

// Scratch of one task, on its stack.
struct Scratch {
  alignas(64) float keys_or_values[kMaxHeadDim * kTileTokens];
  alignas(64) float scores[kMaxTileRows * kTileTokens];
  alignas(64) float alpha[kMaxTileRows];
  const float* weights[kMaxTileRows];  // the rows of `scores`
  TileTokens tiles[3];                 // this one, the next, and the following task's first
  int64_t task_end;
  const FollowingTask* following;      // null: there is none, or it has been prefetched
};

// Few rows: every element of K and V is used once, so it is converted in passing; the next tile is fetched row by row.
template <class Kv>
void attend_tile_few(const AttentionCall& call, const UnitRows& rows, const TileTokens& tile, const TilesAhead& ahead,
                     Scratch* scratch, RowStates* states) {
  const int num_vecs = (tile.count + kLanes - 1) / kLanes;
  const KeyChannels<Kv> keys{tile, {ahead, 0, call.token_bytes}};
  const int num_rest = num_vecs % block_vecs(rows.count);  // dearer one by one than as a whole block, from two on
  const int num_key_vecs = num_rest > 1 ? num_vecs - num_rest + block_vecs(rows.count) : num_vecs;
  multiply<false>(rows.count, rows.queries, scratch->alpha, call.head_dim, keys, num_key_vecs, scratch->scores,
                  kTileTokens);
  softmax_tile<Kv>(call, rows, tile, num_vecs, scratch->scores, states, scratch->alpha);
  const ValueTokens<Kv> values{tile, call.value_bytes, {ahead, call.value_bytes, call.token_bytes}};
  multiply<true>(rows.count, scratch->weights, scratch->alpha, tile.count, values, call.head_dim / kLanes, states->o,
                 call.padded_dim);
}

// Many rows, or tokens that are not in groups: K and V are converted once for all rows.
template <class Kv>
void attend_tile_many(const AttentionCall& call, const AttentionUnit& unit, const UnitRows& rows,
                      const TileTokens& tile, const TilesAhead& ahead, Scratch* scratch, RowStates* states) {
  const int num_vecs = (tile.count + kLanes - 1) / kLanes;
  float* buffer = scratch->keys_or_values;
  TilePrefetch{ahead, 0, call.token_bytes}.all_from(0);
  load_keys<Kv>(call, unit, tile, buffer);
  multiply<false>(rows.count, rows.queries, scratch->alpha, call.head_dim, DenseRows{buffer, kTileTokens}, num_vecs,
                  scratch->scores, kTileTokens);
  softmax_tile<Kv>(call, rows, tile, num_vecs, scratch->scores, states, scratch->alpha);
  TilePrefetch{ahead, call.value_bytes, call.token_bytes}.all_from(0);
  load_values<Kv>(call, unit, tile, buffer);
  multiply<true>(rows.count, scratch->weights, scratch->alpha, tile.count, DenseRows{buffer, call.padded_dim},
                 call.padded_dim / kLanes, states->o, call.padded_dim);
}

// Attention over one split, from a fresh state. What the thread reads after it is prefetched as well: the next split's
// first tile, or near the task's end the following task's.
template <class Kv>
void attend_split(const AttentionCall& call, const AttentionUnit& unit, const UnitRows& rows, int64_t split,
                  Scratch* scratch, RowStates* states) {
  reset(call, rows.count, states);
  const int64_t first = unit.kv_begin / kTileTokens * kTileTokens;
  const int64_t split_begin = split * kSplitTokens;
  const int64_t begin = first > split_begin ? first : split_begin;
  const int64_t end = split_begin + kSplitTokens < unit.kv_end ? split_begin + kSplitTokens : unit.kv_end;
  const bool are_few = rows.count <= kBlockRows && call.head_dim % kLanes == 0 && call.key_group == kKeyGroup;
  TileTokens* tile = &scratch->tiles[0];
  TileTokens* next = &scratch->tiles[1];
  const int64_t task_end = scratch->task_end;
  locate_tile<Kv>(call, unit, begin, tile);
  for (int64_t start = begin; start < end; start += kTileTokens) {
    TilesAhead ahead{};
    if (start + kTileTokens < task_end) {
      locate_tile<Kv>(call, unit, start + kTileTokens, next);
      ahead.next = next;
    }
    // A task's last tile may be too short to fetch a whole one meanwhile.
    const bool is_last = ahead.next == nullptr;
    const bool is_before_short = !is_last && start + 2 * kTileTokens >= task_end && next->count < kShortTile;
    if (scratch->following != nullptr && (is_last || is_before_short)) {
      ahead.following = &scratch->tiles[2];
      locate_tile<Kv>(call, *scratch->following->unit, scratch->following->start, &scratch->tiles[2]);
      scratch->following = nullptr;
    }
    if constexpr (Kv::kHasScales) load_scales(call, unit, tile);
    if (are_few) {
      attend_tile_few<Kv>(call, rows, *tile, ahead, scratch, states);
    } else {
      attend_tile_many<Kv>(call, unit, rows, *tile, ahead, scratch, states);
    }
    std::swap(tile, next);
  }
  add_up_lanes(rows.count, states);
}

// A split's place among the unit's partials: o of every row, then all m, then all l.
float* partial_of(const AttentionCall& call, const AttentionUnit& unit, int64_t split) {
  const int64_t index = split - unit.kv_begin / kSplitTokens;
  return unit.partials + index * unit.num_rows * (call.padded_dim + 2);
}

void fold_states(const AttentionCall& call, int num_rows, const float* m, const float* l, const float* o,
                 RowStates* sum) {
  for (int r = 0; r < num_rows; ++r) {
    fold_row(call.padded_dim, m[r], l[r], o + r * call.padded_dim, &sum->m[r], &sum->l[r],
             sum->o + r * call.padded_dim);
  }
}

void write_rows(const AttentionCall& call, const UnitRows& rows, const RowStates& states) {
  for (int r = 0; r < rows.count; ++r) {
    write_row(call.head_dim, states.l[r], states.o + r * call.padded_dim, rows.outs[r]);
  }
}

template <class Kv>
void attend_task(const AttentionCall& call, const AttentionUnit& unit, const AttentionTask& task,
                 const FollowingTask* following) {
  if (unit.prepares) {
    for (int64_t token = call.cu_seqlens[unit.sequence]; token < call.cu_seqlens[unit.sequence + 1]; ++token) {
      prepare(call, token, unit.kv_head);
    }
  }
  UnitRows rows;
  locate_rows(call, unit, &rows);
  Scratch scratch;
  for (int r = 0; r < rows.count; ++r) scratch.weights[r] = scratch.scores + r * kTileTokens;
  RowStates states;
  RowStates sum;
  const int64_t split_end = task.first_split + task.num_splits;
  scratch.task_end = split_end * kSplitTokens < unit.kv_end ? split_end * kSplitTokens : unit.kv_end;
  scratch.following = following;
  for (int64_t split = task.first_split; split < split_end; ++split) {
    attend_split<Kv>(call, unit, rows, split, &scratch, &states);
    if (unit.partials != nullptr) {
      float* partial = partial_of(call, unit, split);
      const size_t num_floats = static_cast<size_t>(rows.count) * call.padded_dim;
      std::memcpy(partial, states.o, num_floats * sizeof(float));
      std::memcpy(partial + num_floats, states.m, static_cast<size_t>(rows.count) * sizeof(float));
      std::memcpy(partial + num_floats + rows.count, states.l, static_cast<size_t>(rows.count) * sizeof(float));
    } else if (task.num_splits > 1) {
      if (split == task.first_split) std::memset(sum.l, 0, sizeof(sum.l));
      fold_states(call, rows.count, states.m, states.l, states.o, &sum);
    }
  }
  if (unit.partials == nullptr) write_rows(call, rows, task.num_splits > 1 ? sum : states);
}

void attend(const AttentionCall& call, const AttentionUnit& unit, const AttentionTask& task,
            const FollowingTask* following) {
  switch (call.kv_type) {
    case KvType::float32: attend_task<KvFloat32>(call, unit, task, following); break;
    case KvType::float16: attend_task<KvFloat16>(call, unit, task, following); break;
    case KvType::int8: attend_task<KvInt8>(call, unit, task, following); break;
  }
}

void fold(const AttentionCall& call, const AttentionUnit& unit) {
  UnitRows rows;
  locate_rows(call, unit, &rows);
  RowStates sum;
  std::memset(sum.l, 0, sizeof(sum.l));
  const int64_t split_end = (unit.kv_end + kSplitTokens - 1) / kSplitTokens;
  for (int64_t split = unit.kv_begin / kSplitTokens; split < split_end; ++split) {
    const float* o = partial_of(call, unit, split);
    const float* m = o + static_cast<int64_t>(rows.count) * call.padded_dim;
    fold_states(call, rows.count, m, m + rows.count, o, &sum);
  }
  write_rows(call, rows, sum);
}

}  // namespace

const AttentionKernels& attention_kernels() {
  static constexpr AttentionKernels kernels = {prepare, attend, fold};
  return kernels;
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
