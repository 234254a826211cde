// Merges the partial results of the sequences that the attention plan cut, in slot order. README.md has the signature.
//
//   part f32 [num_slots, KVH, 16, D], lse f32 [num_slots, KVH, 16] -> out [num_tokens, QH, D] of T
//   grid (num_seqs, KVH), 128 threads, no shared memory. A thread takes pairs of dimensions of (row, pair), one by one;
//   a sequence without slots costs a look at part_indptr.
//
// out = sum of part_i * 2^(lse_i - L), L = log2 of the sum of 2^lse_i: two passes over at most some dozen slots, the
// first for the largest lse, so that the factors stay within 1.
//
// Bound: reading `part` once. History: 1. as shipped.
#include "scalar.cuh"

using T = SCALAR;
constexpr int kHeadDim = HEAD_DIM;
constexpr int kThreads = 128;
constexpr int kSlotRows = 16;

extern "C" __global__ void __launch_bounds__(kThreads)
    attn_combine(const float* part, const float* lse, const int* part_indptr, const int* cu_seqlens, T* out,
                 int num_kv_heads, int group_size) {
  const int begin = part_indptr[blockIdx.x];
  const int end = part_indptr[blockIdx.x + 1];
  if (begin == end) return;
  const int first_token = cu_seqlens[blockIdx.x];
  const int num_rows = (cu_seqlens[blockIdx.x + 1] - first_token) * group_size;
  const long slot_rows = static_cast<long>(num_kv_heads) * kSlotRows;
  const long first_row = begin * slot_rows + blockIdx.y * kSlotRows;
  for (int i = threadIdx.x; i < num_rows * (kHeadDim / 2); i += kThreads) {
    const int row = i / (kHeadDim / 2);
    const int dim = i % (kHeadDim / 2) * 2;
    float largest = kMasked;
    for (int slot = 0; slot < end - begin; ++slot) largest = fmaxf(largest, lse[first_row + slot * slot_rows + row]);
    float total = 0.0f;
    float2 sum = {0.0f, 0.0f};
    for (int slot = 0; slot < end - begin; ++slot) {
      const long at = first_row + slot * slot_rows + row;
      const float weight = lse[at] == kMasked ? 0.0f : exp2_approx(lse[at] - largest);
      const float2 mine = *reinterpret_cast<const float2*>(part + at * kHeadDim + dim);
      total += weight;
      sum.x += weight * mine.x;
      sum.y += weight * mine.y;
    }
    const float factor = total > 0.0f ? 1.0f / total : 0.0f;
    const long head = static_cast<long>(blockIdx.y) * group_size + row % group_size;
    const long token = first_token + row / group_size;
    T* to = out + (token * num_kv_heads * group_size + head) * kHeadDim + dim;
    *reinterpret_cast<u32*>(to) = pack<T>(sum.x * factor, sum.y * factor);
  }
}
