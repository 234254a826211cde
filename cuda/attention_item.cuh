// What a launch of the attention kernels and one item of its plan say, and the two shapes of the template.
#pragma once

#include "kv_tile.cuh"

// What all items of a launch share.
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
  int window;
  float scale;
  float softcap;
  float v_scale;

  DEVICE long row_offset(int token, int packed_row) const {
    const long num_heads = static_cast<long>(num_kv_heads) * group_size;
    const int head = static_cast<int>(blockIdx.y) * group_size + packed_row % group_size;
    return ((token + packed_row / group_size) * num_heads + head) * kHeadDim;
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
  int context;

  DEVICE static Item at(const int* items, int index) {
    const int4* fields = reinterpret_cast<const int4*>(items) + 2 * index;
    const int4 a = fields[0];
    const int4 b = fields[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  }
  DEVICE int position(int row, int group_size) const { return context - q_len + row / group_size; }
};

// kRowWarps = 1: decode; 4: prefill.
template <int kRowWarps>
struct Shape {
  static constexpr int kRows = 16 * kRowWarps;
  static constexpr int kTokenWarps = kRowWarps == 1 ? kTileTokens / 16 : 1;
  static constexpr int kThreads = 32 * kRowWarps * kTokenWarps;
  static constexpr int kWarpTokens = kTileTokens / kTokenWarps;
};

constexpr int kQueryBytes = kHeadDim * 2 + 16;
constexpr int kMergeRow = kHeadDim + 8;  // float2 stores of a warp's half then touch every bank once
