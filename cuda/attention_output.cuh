// From a warp's softmax to rows of the output, or to a partial result.
#pragma once

#include "attention_softmax.cuh"

// A row of an item as a row of `part`: 16 are in the item's slot, the next 16 in the one behind it.
DEVICE long row_of_part(const Launch& launch, int slot, int row) {
  return (static_cast<long>(slot + row / 16) * launch.num_kv_heads + launch.kv_head) * 16 + row % 16;
}

// A row's lse, of its largest score before `scale`.
DEVICE float log_sum(const Launch& launch, float largest, float total) {
  return total > 0.0f ? largest * launch.scale + log2f(total) : kMasked;
}

// Writes a warp's rows of a prefill item, from its row `first_row` on, to `out`, or to `part` and `lse` if it has a
// slot.
DEVICE void write_rows(const Launch& launch, const Item& item, const Softmax<Prefill>& softmax, int first_row) {
  const int num_rows = item.q_len * launch.group_size - item.first_row;
#pragma unroll
  for (int half = 0; half < 2 * Prefill::kRowTiles; ++half) {
    const int r = half / 2;
    const int half_row = half % 2;
    const int row = first_row + lane_of_thread() / 4 + 8 * half;
    if (row >= num_rows) continue;
    const float total = softmax.total[r][half_row];
    const float factor = total > 0.0f ? launch.v_scale / total : 0.0f;
    const bool is_whole = item.slot < 0;
    const long part_row = row_of_part(launch, item.slot, row);
    const int packed_row = item.first_row + row;
    // A division here: its reciprocal would take a register through all tiles.
    const int row_token = static_cast<int>(static_cast<u32>(packed_row) / static_cast<u32>(launch.group_size));
    T* out = launch.out + launch.row_offset(item.first_token, packed_row, row_token);
    float* part = launch.part + part_row * kHeadDim;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      const SumPair pair = sum_pair(softmax.sums[r], i, half_row);
      const float2 mine = {pair.first * factor, pair.second * factor};
      if (is_whole) {
        *reinterpret_cast<u32*>(out + pair.dim) = pack<T>(mine.x, mine.y);
      } else {
        *reinterpret_cast<float2*>(part + pair.dim) = mine;
      }
    }
    if (!is_whole && (lane_of_thread() & 3) == 0) {
      launch.lse[part_row] = log_sum(launch, softmax.largest[r][half_row], total);
    }
  }
}

// Merges the warps' softmaxes of a decode item and writes its rows to `out`, or to `part` and `lse` if it has a slot.
DEVICE void merge_rows(const Launch& launch, const Item& item, const Softmax<Decode>& softmax, float* sums) {
  using S = Decode;
  static_assert(S::kTokenWarps * 16 * (kMergeRow + 2) * 4 <= 4 * S::kStageBytes, "the merge fits the stages");
  float* maxima = sums + S::kTokenWarps * 16 * kMergeRow;
  float* totals = maxima + S::kTokenWarps * 16;
  const int lane = lane_of_thread();
#pragma unroll
  for (int half_row = 0; half_row < 2; ++half_row) {
    const int row = warp_of_thread() * 16 + lane / 4 + 8 * half_row;
#pragma unroll
    for (int i = 0; i < kHeadDim / 8; ++i) {
      const SumPair pair = sum_pair(softmax.sums[0], i, half_row);
      *reinterpret_cast<float2*>(sums + row * kMergeRow + pair.dim) = float2{pair.first, pair.second};
    }
    if ((lane & 3) == 0) {
      maxima[row] = softmax.largest[0][half_row];
      totals[row] = softmax.total[0][half_row];
    }
  }
  __syncthreads();
  const int num_rows = item.q_len * launch.group_size;
  for (int i = threadIdx.x; i < num_rows * (kHeadDim / 2); i += S::kThreads) {
    const int row = i / (kHeadDim / 2);
    const int dim = i % (kHeadDim / 2) * 2;
    float largest = kMasked;
#pragma unroll
    for (int warp = 0; warp < S::kTokenWarps; ++warp) largest = fmaxf(largest, maxima[warp * 16 + row]);
    float total = 0.0f;
    float2 merged = {0.0f, 0.0f};
#pragma unroll
    for (int warp = 0; warp < S::kTokenWarps; ++warp) {
      const float factor = exp2_approx((maxima[warp * 16 + row] - largest) * launch.scale);
      const float2 mine = *reinterpret_cast<const float2*>(sums + (warp * 16 + row) * kMergeRow + dim);
      total += totals[warp * 16 + row] * factor;
      merged.x += mine.x * factor;
      merged.y += mine.y * factor;
    }
    const float factor = total > 0.0f ? launch.v_scale / total : 0.0f;
    if (item.slot < 0) {
      T* out = launch.out + launch.row_offset(item.first_token, row, launch.token_of(row)) + dim;
      *reinterpret_cast<u32*>(out) = pack<T>(merged.x * factor, merged.y * factor);
    } else {
      const long part_row = row_of_part(launch, item.slot, row);
      *reinterpret_cast<float2*>(launch.part + part_row * kHeadDim + dim) =
          float2{merged.x * factor, merged.y * factor};
      if (dim == 0) launch.lse[part_row] = log_sum(launch, largest, total);
    }
  }
}
