// Merges the partial results of what the attention plan cut: sequences in decode, items in prefill. README.md has the
// signature.
//
//   part f32 [num_slots, KVH, 16, D], lse f32 [num_slots, KVH, 16] -> out [num_tokens, QH, D] of T
//   merges [num_merges, 8]: up to 16 rows, whose parts lie in slots at equal distances
//   grid (at least num_merges, KVH), 512 threads; static shared memory: 8 KB of sums, a maximum and a factor a row
//
// out = sum of part_i * 2^(lse_i - L), L = log2 of the sum of 2^lse_i. A warp a row reads lse, a slot a lane, for the
// largest, which keeps the factors within 1, and for the total. Then groups of D / 4 threads take a row's parts, 16
// bytes a thread. Where there are more groups than rows, several share a row's slots, and their sums are added in
// order. Which slots a group gets depends on the numbers of rows and slots alone: a merge does not depend on others.
//
// Bound: few merges by latency, many by reading `part` once.
//
// History, none of it measured on a GPU yet:
//   1. a block of 128 threads a sequence, a pair of dimensions each, over all slots twice. For one sequence of 8,192
//      tokens on an H200, 4 heads a group, a thread reads 49 slots one after the other, for each of two rows
//   2. as shipped: there 4 groups share a row, so that a thread has 13 loads of 16 bytes, four under way at once
#include "scalar.cuh"

using T = SCALAR;
constexpr int kHeadDim = HEAD_DIM;
constexpr int kThreads = 512;
constexpr int kSlotRows = 16;
constexpr int kChunks = kHeadDim / 4;        // of 16 bytes, in a row of `part`
constexpr int kGroups = kThreads / kChunks;  // of threads
static_assert(kThreads / 32 == kSlotRows, "a warp a row");

namespace {

// What one merge says. Slots: first, first + distance, ...
struct Merge {
  int first_slot;
  int num_slots;
  int distance;
  int first_row;  // packed, of the sequence
  int num_rows;
  int first_token;  // of the sequence

  DEVICE static Merge at(const int* merges, int index) {
    const int4* fields = reinterpret_cast<const int4*>(merges) + 2 * index;
    const int4 a = fields[0];
    const int4 b = fields[1];
    return {a.x, a.y, a.z, a.w, b.x, b.y};
  }
  // Where a row lies in one of its slots, in rows of `part`.
  DEVICE long row_of_part(int slot, int row, int num_kv_heads) const {
    return (static_cast<long>(first_slot + slot * distance) * num_kv_heads + blockIdx.y) * kSlotRows + row;
  }
};

DEVICE float weigh(float lse, float largest) { return lse == kMasked ? 0.0f : exp2_approx(lse - largest); }

// A row's largest lse, and the factor of its sum. A warp together.
DEVICE float2 weigh_row(const Merge& merge, const float* lse, int row, int num_kv_heads) {
  float largest = kMasked;
  for (int slot = lane_of_thread(); slot < merge.num_slots; slot += 32) {
    largest = fmaxf(largest, lse[merge.row_of_part(slot, row, num_kv_heads)]);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) largest = fmaxf(largest, __shfl_xor_sync(kWholeWarp, largest, step));
  float total = 0.0f;
  for (int slot = lane_of_thread(); slot < merge.num_slots; slot += 32) {
    total += weigh(lse[merge.row_of_part(slot, row, num_kv_heads)], largest);
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) total += __shfl_xor_sync(kWholeWarp, total, step);
  return {largest, total > 0.0f ? 1.0f / total : 0.0f};
}

DEVICE void add(float4& sum, float weight, const float4& part) {
  sum.x += weight * part.x;
  sum.y += weight * part.y;
  sum.z += weight * part.z;
  sum.w += weight * part.w;
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    attn_combine(const float* part, const float* lse, const int* merges, const int* num_merges, T* out,
                 int num_kv_heads, int group_size) {
  if (blockIdx.x >= *num_merges) return;
  __shared__ float2 weights[kSlotRows];
  __shared__ float4 sums[kThreads];
  const Merge merge = Merge::at(merges, blockIdx.x);
  const int warp = warp_of_thread();
  if (warp < merge.num_rows) {
    const float2 mine = weigh_row(merge, lse, warp, num_kv_heads);
    if (lane_of_thread() == 0) weights[warp] = mine;
  }
  __syncthreads();
  const int num_shares = max(1, kGroups / merge.num_rows);  // of a row's slots
  const int rows_at_once = kGroups / num_shares;
  const int group = threadIdx.x / kChunks;
  const int chunk = threadIdx.x % kChunks;
  const int share = group % num_shares;
  for (int first = 0; first < merge.num_rows; first += rows_at_once) {
    const int row = first + group / num_shares;
    const bool has_row = group / num_shares < rows_at_once && row < merge.num_rows;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
    if (has_row) {
      const float largest = weights[row].x;
#pragma unroll 4
      for (int slot = share; slot < merge.num_slots; slot += num_shares) {
        const long at = merge.row_of_part(slot, row, num_kv_heads);
        add(sum, weigh(lse[at], largest), reinterpret_cast<const float4*>(part + at * kHeadDim)[chunk]);
      }
    }
    sums[threadIdx.x] = sum;
    __syncthreads();
    if (has_row && share == 0) {
      for (int other = 1; other < num_shares; ++other) add(sum, 1.0f, sums[threadIdx.x + other * kChunks]);
      const float factor = weights[row].y;
      const int packed_row = merge.first_row + row;
      const long token = merge.first_token + packed_row / group_size;
      const long head = static_cast<long>(blockIdx.y) * group_size + packed_row % group_size;
      T* to = out + (token * num_kv_heads * group_size + head) * kHeadDim + chunk * 4;
      *reinterpret_cast<uint2*>(to) =
          uint2{pack<T>(sum.x * factor, sum.y * factor), pack<T>(sum.z * factor, sum.w * factor)};
    }
    __syncthreads();  // the next rows' sums take their place
  }
}
