// Paged attention on tensor cores: one template, a decode shape and a prefill shape. README.md has the signatures.
//
//   q, out [num_tokens, QH, D] of T; kv [num_blocks, 2, KVH, BLOCK_SIZE, D]; items [num_items, 8]
//   decode   grid (P, KVH), 2 * TILE_TOKENS threads. 16 packed rows; each warp takes 16 tokens of a tile, and the warps
//            merge their softmaxes through shared memory at the end of an item. A block walks its range of items.
//   prefill  grid (KVH, max_items), 32 * PREFILL_WARPS threads. PREFILL_ROWS packed rows, 16 or 32 a warp; every warp
//            takes all PREFILL_TILE_TOKENS tokens of a tile. Heads come first: so blocks start longest first.
// Both write rows of `out`, or of partial results where the plan cut an item: attention_combine.cu merges them.
//
// A packed row is one (token, query head of the group) pair, so that K and V are read once a KV head. Tiles come by
// cp.async into two stages; the blocks of the tile after are looked up while it is on its way.
//
// Shared memory: queries [rows][D + 8] of 16 bits, the position of a row's token in what pads it; then keys and values,
// two stages each, rows padded by 16 bytes. The merge of a decode item uses the stages again: sums f32
// [warps][16][D + 8], maxima and totals f32 [warps][16].
//
// Bound, by counting for sm_90, D 128 and bf16: decode by reading K and V once. Prefill by the tensor cores: 128 rows of
// a tile of 64 tokens take them 1,640 cycles, and shared memory 1,536 (of four warps 80 matrix loads of 4 cycles each;
// 256 for the copies), the schedulers 953, the exponentials 1,056.
//
// History, none of it measured on a GPU yet:
//   1. a thread block a sequence and KV head, products by fused multiply-adds: instructions bound it at 8 heads a group
//   2. tensor cores, with one block an item: any group costs the same
//   3. a persistent grid over equal ranges of tiles: skewed batches are spread evenly (`test_attention_plan.py`)
//   4. block ids a tile ahead, one a lane: no dependent read from global memory between a tile and its copies
//   5. copies in a number of rounds that the compiler knows: at D 128 on sm_90, 356 instead of 535 instructions a warp
//      and tile in decode
//   6. keys and values in copy groups of their own: scores do not wait for values; still two barriers a tile
//   7. no division: a packed row's token is a product's high half, the soft cap a reciprocal. 345 instructions in
//      decode; in prefill, whose loop had 32 calls of a division for soft caps, 871 in the loop instead of 1,629
//   8. 32 rows a warp in prefill where registers allow: keys and values are loaded once for both sixteens. For 128 rows
//      80 matrix loads a warp instead of 144, 953 instructions instead of 1,166, and shared memory 1,536 cycles instead
//      of 2,816
//   9. decode scales its sums only in tiles where a maximum rises: 277 instructions where none does, 351 where one does
//  10. the next item of a decode block is read while the one before is computed
//  11. prefill items are cut where blocks would idle. 32 tokens behind 32,768 cached, 4 heads a group, 8 KV heads: 33
//      blocks a KV head of an H200 work and not one, for 17 MB of partial results, written and read, beside 134 MB of K
//      and V. Several decode items of 16 rows instead would have read these eight times. What the loop and its end both
//      needed, positions of rows, went from registers to shared memory, nine instructions more a warp and tile; what its
//      end alone needs is read again there
#include "attention_output.cuh"

namespace {

// Starts to copy an item's rows, zeros for those beyond its last, and notes their positions.
template <class S>
DEVICE void load_queries(const Launch& launch, const Item& item, char* queries) {
  static_assert(S::kRows <= S::kThreads, "a thread has at most one row's position");
  if (threadIdx.x < S::kRows) {
    position_of(queries, threadIdx.x) = item.num_before + launch.token_of(item.first_row + threadIdx.x);
  }
  const int num_rows = item.q_len * launch.group_size;
  deal<S::kRows * (kHeadDim / 8), S::kThreads>([&](int i, int) {
    const int row = i / (kHeadDim / 8);
    const int chunk = i % (kHeadDim / 8);
    const bool is_wanted = item.first_row + row < num_rows;
    const int packed_row = is_wanted ? item.first_row + row : 0;
    const long offset = launch.row_offset(item.first_token, packed_row, launch.token_of(packed_row));
    place_query(launch.q + offset + chunk * 8, queries + row * kQueryBytes, chunk, is_wanted);
  });
}

template <class S>
DEVICE void attend(const Launch& launch, const int* items, const Item& item, char* queries) {
  char* keys = queries + S::kRows * kQueryBytes;
  char* values = keys + 2 * S::kStageBytes;
  load_queries<S>(launch, item, queries);
  const Pages pages(launch.kv, launch.block_table, item.sequence * launch.table_stride, item.kv_end,
                    launch.num_kv_heads, launch.kv_head);
  int blocks = pages.blocks_from<S::kTileTokens>(item.kv_begin);
  const auto copy_tile = [&](int start, int stage) {  // two groups, of nothing behind the last tile
    if (start < item.kv_end) {
      const int num_tokens = item.kv_end - start;
      pages.copy<S::kTileTokens, S::kThreads>(pages.keys, blocks, num_tokens, keys + stage * S::kStageBytes);
      commit_copies();
      pages.copy<S::kTileTokens, S::kThreads>(pages.keys + pages.value_bytes, blocks, num_tokens,
                                              values + stage * S::kStageBytes);
      blocks = pages.blocks_from<S::kTileTokens>(start + S::kTileTokens);
    } else {
      commit_copies();
    }
    commit_copies();
  };
  copy_tile(item.kv_begin, 0);

  const int first_row = warp_of_thread() % S::kRowWarps * S::kWarpRows;  // of the item's
  const int warp_token = warp_of_thread() / S::kRowWarps * S::kWarpTokens;
  char* warp_queries = queries + first_row * kQueryBytes;
  Softmax<S> softmax;
  int stage = 0;
  for (int start = item.kv_begin; start < item.kv_end; start += S::kTileTokens, stage ^= 1) {
    const int end = start + S::kTileTokens;
    const int tokens_before = stage * S::kStageBytes + warp_token * kPaddedBytes;
    wait_for_copies<1>();
    __syncthreads();  // keys are there; the tile before is done with
    const int first_position = position_of(warp_queries, 0);
    // Of a window, at most kWarpRows positions too early: a mask that masks nothing does no harm.
    const bool is_edge =
        end > min(item.kv_end, first_position + 1) || start + launch.window < first_position + S::kWarpRows;
    if constexpr (S::kIsDecode) copy_tile(end, stage ^ 1);
    softmax.score(launch, item, warp_queries, keys + tokens_before, start + warp_token, is_edge);
    // With 32 rows and D 128 there are no registers for addresses before, and products hide the copies anyhow.
    if constexpr (!S::kIsDecode) copy_tile(end, stage ^ 1);
    wait_for_copies<2>();
    __syncthreads();  // values are there
    softmax.add_values(launch, values + tokens_before);
  }
  wait_for_copies<0>();  // the queries, if there was no tile
  softmax.reduce_totals();
  __syncthreads();  // the last tile is done with, the positions are there
  if constexpr (S::kIsDecode) {
    merge_rows(launch, item, softmax, reinterpret_cast<float*>(keys));
  } else {
    // Read again: the loop above has no register for what only its end needs.
    write_rows(launch, Item::at(items, blockIdx.y), softmax, first_row);
  }
}

}  // namespace

// As many blocks as the shared memory of a large multiprocessor holds must have registers; more would only spill.
// Prefill is to have eight warps there.
constexpr int kDecodeBlocks = kHeadDim <= 64 ? 5 : kHeadDim <= 96 ? 4 : kHeadDim <= 128 ? 3 : 2;
constexpr int kPrefillBlocks = 256 / Prefill::kThreads;

extern "C" __global__ void __launch_bounds__(Decode::kThreads, kDecodeBlocks)
    attn_decode(const T* q, const void* kv, const int* block_table, const int* items, const int* item_indptr, T* out,
                float* part, float* lse, int table_stride, int num_kv_heads, int group_size, int window, float scale,
                float softcap, float v_scale) {
  extern __shared__ __align__(128) char smem[];
  const Launch launch(q, kv, block_table, out, part, lse, table_stride, num_kv_heads, group_size, window, scale,
                      softcap, v_scale, blockIdx.y);
  int i = item_indptr[blockIdx.x];
  const int end = item_indptr[blockIdx.x + 1];
  if (i == end) return;
  Item item = Item::at(items, i);
  for (; i < end; ++i) {
    const Item next = Item::at(items, min(i + 1, end - 1));  // comes meanwhile
    attend<Decode>(launch, items, item, smem);
    item = next;
    __syncthreads();  // the next item's queries and tiles take the place of what was merged
  }
}

extern "C" __global__ void __launch_bounds__(Prefill::kThreads, kPrefillBlocks)
    attn_prefill(const T* q, const void* kv, const int* block_table, const int* items, const int* item_indptr, T* out,
                 float* part, float* lse, int table_stride, int num_kv_heads, int group_size, int window, float scale,
                 float softcap, float v_scale) {
  extern __shared__ __align__(128) char smem[];
  const Launch launch(q, kv, block_table, out, part, lse, table_stride, num_kv_heads, group_size, window, scale,
                      softcap, v_scale, blockIdx.x);
  const int i = blockIdx.y;
  if (i < item_indptr[0]) attend<Prefill>(launch, items, Item::at(items, i), smem);
}
