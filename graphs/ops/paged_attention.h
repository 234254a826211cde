// What the PagedAttention op, its planner and its kernels share: one call's tensors, and units of work.
//
// Vocabulary. A *row* is one query head of one token; the rows of a sequence that share a kv head are numbered
// token * group_size + (head within the group). A *unit* is a run of at most `tile_rows` such rows, so K and V are read
// once for all of them. A *tile* is 64 token positions of K and V, a *split* 512 of them; both begin at absolute
// multiples of their length, so what is added to what never depends on the batch, on chunks or on threads.
#pragma once

#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace chairlift {

constexpr int kTileTokens = 64;
constexpr int kSplitTokens = 512;
constexpr int kKeyGroup = 16;
constexpr int kMaxHeadDim = 256;
constexpr int kMaxTileRows = 48;
constexpr int kMaxTileFloats = 6144;  // tile_rows * padded_dim: the output tile stays in the first-level cache

// The op's inputs, whichever provider it runs on.
enum AttentionInput : size_t {
  kQkv,
  kKvCache,
  kCuSeqlens,
  kContextLens,
  kBlockTable,
  kSlotMapping,
  kPositions,
  kCos,
  kSin,
  kWorkspace,
  kQNorm,
  kKNorm
};

enum class KvType { float32, float16, int8 };

// One call of the op. Pointers are borrowed from the runtime for the call.
struct AttentionCall {
  // Attributes.
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t group_size;  // num_heads / num_kv_heads
  int32_t head_dim;
  int32_t padded_dim;      // head_dim rounded up to 16
  int32_t tile_rows;       // most rows of a unit
  int64_t sliding_window;  // a token sees this many tokens, itself included; 0: all before it
  float score_scale;       // scale * log2(e): scores are kept as exponents of two
  float softcap;           // 0: none
  float norm_epsilon;

  // Extents.
  int64_t num_tokens;
  int64_t num_seqs;
  int64_t max_blocks;  // columns of block_table
  int64_t num_blocks;
  int64_t block_size;
  int64_t rotary_half;  // columns of cos and sin

  // The KV buffer: block -> K or V -> head -> token -> channel; int8 has the scales of a head's tokens behind its
  // values. K is read by channels, so it lies in groups of tokens: block -> K -> head -> group -> channel -> token.
  KvType kv_type;
  int64_t key_group;  // tokens of a group: kKeyGroup, or all of a block that is no multiple of it
  int64_t token_bytes;
  int64_t head_bytes;
  int64_t value_bytes;  // from a K to the V of the same slot and head
  int64_t block_bytes;
  uint8_t* kv_cache;

  const float* qkv;             // [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
  const int32_t* cu_seqlens;    // [num_seqs + 1]
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* block_table;   // [num_seqs, max_blocks]
  const int32_t* slot_mapping;  // [num_tokens]
  const int32_t* positions;     // [num_tokens]
  const float* cos;             // [max_position, rotary_half]
  const float* sin;
  const float* q_norm;  // [head_dim] or null
  const float* k_norm;
  float* out;  // [num_tokens, num_heads * head_dim]; holds the rotated, scaled queries until their row is done
};

struct AttentionUnit {
  int32_t sequence;
  int32_t kv_head;
  int64_t first_row;
  int32_t num_rows;
  int64_t kv_begin;  // first token position that any row sees
  int64_t kv_end;    // one past the last
  float* partials;   // null: one task does the whole unit; else per split num_rows * (padded_dim + 2) floats
  int32_t num_tasks;
  bool prepares;  // the unit is all that reads its sequence's new tokens at its kv head, so it prepares them itself
};

// Splits [first_split, first_split + num_splits) of a unit.
struct AttentionTask {
  int32_t unit;
  int32_t first_split;
  int32_t num_splits;
};

// Where a task that comes next begins to read KV.
struct FollowingTask {
  const AttentionUnit* unit;
  int64_t start;  // position of its first tile
};

// Tokens [first_token, first_token + num_tokens) at some kv heads, to be prepared before any unit starts.
struct AttentionPreparation {
  int64_t first_token;
  int64_t num_tokens;
  int32_t first_kv_head;
  int32_t num_kv_heads;
};

// The part that depends on the instruction set.
struct AttentionKernels {
  // Norm, rotation and scaling of one token's query heads of a kv head's group (into `out`), and of its key; writes key
  // and value to the token's slot. Tokens past the last sequence get zeros in `out`.
  void (*prepare)(const AttentionCall&, int64_t token, int32_t kv_head);
  // Attention of a unit over the task's splits: into `out`, or into the unit's partials; after preparing, if the unit
  // does that. `following` (or null) is the task that this thread takes up next: its first tile is prefetched.
  void (*attend)(const AttentionCall&, const AttentionUnit&, const AttentionTask&, const FollowingTask* following);
  // Combines all partials of a unit, in order, into `out`.
  void (*fold)(const AttentionCall&, const AttentionUnit&);
};

CHAIRLIFT_PER_ISA(const AttentionKernels& attention_kernels())

}  // namespace chairlift
