// Tiles of keys and values: from the pages of the KV buffer to shared memory, and from there to operands of the tensor
// cores. What depends on the type of the KV buffer is here and nowhere else.
//
// A row of a tile is one token's head, padded by 16 bytes: its length in units of 16 bytes is odd for every head_dim
// and type, so eight rows of a matrix load lie in different banks.
//
// e4m3 bytes widen to float16 without a conversion instruction (sm_80 has none): sign, four bits of exponent and three
// of mantissa move to their places in a float16, which is the value divided by 2^8; kWidened, which whoever scales
// results multiplies in, takes that back. A matrix load moves pairs of bytes, so its lanes get other elements than with
// 16 bits:
// of keys, a lane has dimensions 4i to 4i + 3 of sixteen, and queries are permuted to match; of values, even and odd
// dimensions, which changes the dimensions that a lane sums.
#pragma once

#include "kv_buffer.cuh"
#include "tensor_core.cuh"

#if KV_FP8
using Operand = half;
#else
using Operand = T;
#endif

constexpr bool kIsFp8 = KV_FP8;

constexpr int kRowBytes = kHeadDim * static_cast<int>(sizeof(Kv));
constexpr int kRowChunks = kRowBytes / 16;
constexpr int kPaddedBytes = kRowBytes + 16;
constexpr float kWidened = kIsFp8 ? 256.0f : 1.0f;

static_assert(kRowBytes % 32 == 0, "a matrix load takes 32 bytes of a row");

// body(i, round) for this thread's share of kCount: i = threadIdx.x, threadIdx.x + kThreads, ... in rounds 0, 1, ...
// The number of rounds is known to the compiler, unlike that of a loop from threadIdx.x to kCount, and a warp is in a
// round as a whole.
template <int kCount, int kThreads, class Body>
DEVICE void deal(const Body& body) {
  static_assert(kCount % 32 == 0, "a warp is in a round as a whole");
#pragma unroll
  for (int round = 0; round < (kCount + kThreads - 1) / kThreads; ++round) {
    const int i = threadIdx.x + round * kThreads;
    if (kCount % kThreads == 0 || i < kCount) body(i, round);
  }
}

// One sequence's pages at one KV head.
struct Pages {
  const char* keys;  // of block 0
  int block_bytes;
  int value_bytes;  // from a key to its value
  const int* block_table;
  int first_entry;  // of the sequence in it; a pointer there would take another register
  int num_tokens;

  DEVICE Pages(const void* kv, const int* block_table, int first_entry, int num_tokens, int num_kv_heads, int kv_head)
      : keys(static_cast<const char*>(kv) + static_cast<long>(kv_head) * kBlockSize * kRowBytes),
        block_bytes(2 * num_kv_heads * kBlockSize * kRowBytes),
        value_bytes(num_kv_heads * kBlockSize * kRowBytes),
        block_table(block_table),
        first_entry(first_entry),
        num_tokens(num_tokens) {}

  // Lane i: the i-th block of the tile from token `start` on; the null block beyond the last.
  template <int kTileTokens>
  DEVICE int blocks_from(int start) const {
    const int token = start + lane_of_thread() * kBlockSize;
    const bool is_wanted = lane_of_thread() < kTileTokens / kBlockSize && token < num_tokens;
    return is_wanted ? block_table[first_entry + static_cast<u32>(token) / kBlockSize] : 0;
  }

  // Starts to copy the keys (`from` = keys) or values (keys + value_bytes) of the first `num_tokens` tokens of a tile,
  // and writes zeros for the others. All threads together. `tile_blocks`: blocks_from(the tile's start).
  template <int kTileTokens, int kThreads>
  DEVICE void copy(const char* from, int tile_blocks, int num_tokens, char* stage) const {
    // Where a round of the block's threads copies whole rows of one block of tokens, that block is the same for all of
    // them and for the rounds that follow it.
    constexpr int kRoundTokens = kThreads / kRowChunks;
    constexpr bool kIsEven = kThreads % kRowChunks == 0 && kBlockSize % kRoundTokens == 0;
    const char* block = nullptr;
    deal<kTileTokens * kRowChunks, kThreads>([&](int i, int round) {
      const int token = kIsEven ? round * kRoundTokens + threadIdx.x / kRowChunks : i / kRowChunks;
      const int byte = (kIsEven ? threadIdx.x : i) % kRowChunks * 16;
      if (!kIsEven || round * kRoundTokens % kBlockSize == 0) {
        const int lane = (kIsEven ? round * kRoundTokens : token) / kBlockSize;
        block = from + static_cast<long>(__shfl_sync(kWholeWarp, tile_blocks, lane)) * block_bytes;
      }
      copy_async(stage + token * kPaddedBytes + byte, block + token % kBlockSize * kRowBytes + byte,
                 token < num_tokens);
    });
  }
};

// Two bytes of e4m3, named by the bytes of `selector`, as two float16 numbers, each divided by 2^8.
template <u32 selector>
DEVICE u32 widen(u32 bytes) {
  const u32 high = __byte_perm(bytes, 0, selector);
  return (high >> 1 & 0x3f803f80u) | (high & 0x80008000u);
}

// Queries of one row, 8 dimensions from `chunk` * 8 on, to shared memory as operands of `multiply_keys`.
DEVICE void place_query(const T* from, char* row, int chunk, bool is_wanted) {
  if constexpr (!kIsFp8) {
    copy_async(row + chunk * 16, from, is_wanted);
  } else {
    const uint4 four = *reinterpret_cast<const uint4*>(from);
    const u32 pairs[4] = {four.x, four.y, four.z, four.w};
    u32* to = reinterpret_cast<u32*>(row) + chunk / 2 * 8 + chunk % 2 * 2;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = saturate<half>(first_of<T>(pairs[i])), second = saturate<half>(second_of<T>(pairs[i]));
      to[i % 2 * 4 + i / 2] = is_wanted ? pack<half>(first, second) : 0u;
    }
  }
}

// scores[16 kRowTiles rows, kTokens] += queries * keys^T. `queries`: these rows of `query_bytes`; `keys`: kTokens rows
// of a stage. What is loaded of the keys is multiplied with every 16 rows.
template <int kRowTiles, int kTokens>
DEVICE void multiply_keys(const char* queries, int query_bytes, const char* keys,
                          float (&scores)[kRowTiles][kTokens / 8][4]) {
  constexpr int kLoads = kIsFp8 ? 2 : 1;  // of queries, for 32 bytes of keys
  const int lane = lane_of_thread();
  const char* query = queries + (lane & 15) * query_bytes + (lane >> 4) * 16;
  const char* key = keys + ((lane >> 4) * 8 + (lane & 7)) * kPaddedBytes + (lane >> 3 & 1) * 16;
#pragma unroll
  for (int step = 0; step < kRowBytes / 32; ++step) {
    u32 a[kRowTiles][kLoads][4];
#pragma unroll
    for (int i = 0; i < kRowTiles * kLoads; ++i) {
      const int byte = (step * kLoads + i % kLoads) * 32;
      load_matrices(a[i / kLoads][i % kLoads], query + i / kLoads * 16 * query_bytes + byte);
    }
#pragma unroll
    for (int n = 0; n < kTokens / 16; ++n) {
      u32 b[4];
      load_matrices(b, key + n * 16 * kPaddedBytes + step * 32);
      if constexpr (!kIsFp8) {
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          multiply_add<Operand>(scores[r][2 * n], a[r][0], b[0], b[1]);
          multiply_add<Operand>(scores[r][2 * n + 1], a[r][0], b[2], b[3]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 first[2] = {widen<0x1404>(b[i]), widen<0x3424>(b[i])};
          const u32 second[2] = {widen<0x1404>(b[2 + i]), widen<0x3424>(b[2 + i])};
#pragma unroll
          for (int r = 0; r < kRowTiles; ++r) {
            multiply_add<Operand>(scores[r][2 * n], a[r][i], first[0], first[1]);
            multiply_add<Operand>(scores[r][2 * n + 1], a[r][i], second[0], second[1]);
          }
        }
      }
    }
  }
}

// sums[16 kRowTiles rows, head_dim] += weights[these rows, 16 tokens] * values of these tokens.
template <int kRowTiles>
DEVICE void multiply_values(const u32 (&weights)[kRowTiles][4], const char* values,
                            float (&sums)[kRowTiles][kHeadDim / 8][4]) {
  const int lane = lane_of_thread();
  const char* value = values + (lane & 15) * kPaddedBytes + (lane >> 4) * 16;
#pragma unroll
  for (int step = 0; step < kRowBytes / 32; ++step) {
    u32 b[4];
    load_matrices_transposed(b, value + step * 32);
    if constexpr (!kIsFp8) {
#pragma unroll
      for (int r = 0; r < kRowTiles; ++r) {
        multiply_add<Operand>(sums[r][2 * step], weights[r], b[0], b[1]);
        multiply_add<Operand>(sums[r][2 * step + 1], weights[r], b[2], b[3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const u32 even[2] = {widen<0x2404>(b[2 * i]), widen<0x2404>(b[2 * i + 1])};
        const u32 odd[2] = {widen<0x3414>(b[2 * i]), widen<0x3414>(b[2 * i + 1])};
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
          multiply_add<Operand>(sums[r][4 * step + 2 * i], weights[r], even[0], even[1]);
          multiply_add<Operand>(sums[r][4 * step + 2 * i + 1], weights[r], odd[0], odd[1]);
        }
      }
    }
  }
}

// A lane's sums of one row come in pairs of neighbouring dimensions: pair i of kHeadDim / 8.
struct SumPair {
  int dim;  // of the first
  float first;
  float second;
};

// `half_row`: 0 for row lane / 4, 1 for the row 8 further.
DEVICE SumPair sum_pair(const float (&sums)[kHeadDim / 8][4], int i, int half_row) {
  const int column = lane_of_thread() & 3;
  if constexpr (!kIsFp8) {
    return {i * 8 + column * 2, sums[i][2 * half_row], sums[i][2 * half_row + 1]};
  } else {
    const int even = i & ~1;
    const int j = 2 * half_row + (i & 1);
    return {even * 8 + column * 4 + (i & 1) * 2, sums[even][j], sums[even + 1][j]};
  }
}
