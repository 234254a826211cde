// What a launch of the attention kernels and one item of its plan say, and the two shapes of the template.
#pragma once

#include "kv_tile.cuh"

constexpr int kNoWindow = 1 << 30;  // more than any position, and twice this is no overflow

// What all items of a launch share. Arguments of the kernels, made ready for what every item asks of them.
struct Launch {
  const T* q;
  const void* kv;
  const int* block_table;
  T* out;
  float* part;
  float* lse;
  int table_stride;
  int num_kv_heads;
  int group_size;
  u32 group_reciprocal;  // 2^31 / group_size, rounded up
  int window;            // or kNoWindow, which no comparison has to ask for
  float scale;
  float softcap;
  float v_scale;
  int kv_head;  // of this block

  DEVICE Launch(const T* q, const void* kv, const int* block_table, T* out, float* part, float* lse, int table_stride,
                int num_kv_heads, int group_size, int window, float scale, float softcap, float v_scale, int kv_head)
      : q(q),
        kv(kv),
        block_table(block_table),
        out(out),
        part(part),
        lse(lse),
        table_stride(table_stride),
        num_kv_heads(num_kv_heads),
        group_size(group_size),
        group_reciprocal(0x7fffffffu / group_size + 1),
        window(window > 0 ? window : kNoWindow),
        scale(scale * kWidened),
        softcap(softcap),
        v_scale(v_scale * kWidened),
        kv_head(kv_head) {}

  // packed_row / group_size, exactly, for rows below 2^27: groups have at most 16.
  DEVICE int token_of(int packed_row) const {
    return static_cast<int>(__umulhi(2u * static_cast<u32>(packed_row), group_reciprocal));
  }
  // Where a packed row of a sequence begins in q and out: the sequence's first token, and the row's from there.
  DEVICE long row_offset(int first_token, int packed_row, int row_token) const {
    const int group_head = packed_row - row_token * group_size;
    const long num_heads = static_cast<long>(num_kv_heads) * group_size;
    return ((first_token + row_token) * num_heads + kv_head * group_size + group_head) * kHeadDim;
  }
};

struct Item {
  int sequence;
  int first_row;
  int q_len;
  int kv_begin;
  int kv_end;
  int slot;
  int first_token;
  int num_before;  // tokens of the sequence before this step's

  DEVICE static Item at(const int* items, int index) {
    const int4* fields = reinterpret_cast<const int4*>(items) + 2 * index;
    const int4 a = fields[0];
    const int4 b = fields[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w - a.z};
  }
};

// What the warps of a block take: each kRowTiles times 16 rows of one of kRowWarps, and of a tile the tokens of one of
// kTokenWarps.
template <int kRowTiles_, int kRowWarps_, int kTokenWarps_, int kTileTokens_>
struct Shape {
  static constexpr int kRowTiles = kRowTiles_;
  static constexpr int kRowWarps = kRowWarps_;
  static constexpr int kTokenWarps = kTokenWarps_;
  static constexpr int kTileTokens = kTileTokens_;
  static constexpr bool kIsDecode = kTokenWarps > 1;
  static constexpr int kWarpRows = 16 * kRowTiles;
  static constexpr int kRows = kWarpRows * kRowWarps;
  static constexpr int kWarpTokens = kTileTokens / kTokenWarps;
  static constexpr int kThreads = 32 * kRowWarps * kTokenWarps;
  static constexpr int kStageBytes = kTileTokens * kPaddedBytes;  // of keys, or of values
  static_assert(kTileTokens % kBlockSize == 0, "a tile is whole blocks");
};
using Decode = Shape<1, 1, TILE_TOKENS / 16, TILE_TOKENS>;
using Prefill = Shape<PREFILL_ROWS / (16 * PREFILL_WARPS), PREFILL_WARPS, 1, PREFILL_TILE_TOKENS>;

constexpr int kQueryBytes = kHeadDim * 2 + 16;

// Of the token of row `row` of `queries`, in what pads the row: registers for it would be spilled.
DEVICE int& position_of(char* queries, int row) {
  return *reinterpret_cast<int*>(queries + row * kQueryBytes + kHeadDim * 2);
}

// float2 stores of a warp's half then touch every bank once; with KV_FP8, whose pairs lie four apart, two lanes meet.
constexpr int kMergeRow = kHeadDim + 8;
