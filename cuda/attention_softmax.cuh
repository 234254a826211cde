// The running softmax of a warp's packed rows in its registers: scores, masks, weights and weighted values.
#pragma once

#include "attention_item.cuh"

// Of every 16 rows a lane keeps two: lane / 4 and the one 8 further. `r` counts these 16, `half_row` those two.
template <class S>
struct Softmax {
  float scores[S::kRowTiles][S::kWarpTokens / 8][4];  // of the tile at hand
  float sums[S::kRowTiles][kHeadDim / 8][4];          // weighted values
  float largest[S::kRowTiles][2];                     // scores, before `scale`
  float total[S::kRowTiles][2];                       // of this lane's weights

  DEVICE Softmax() {
#pragma unroll
    for (int r = 0; r < S::kRowTiles; ++r) {
      largest[r][0] = largest[r][1] = kMasked;
      total[r][0] = total[r][1] = 0.0f;
    }
    clear(sums);
  }

  // Begins with this warp's tokens of a tile: their scores. `queries`, `keys`: their rows.
  DEVICE void score(const Launch& launch, const Item& item, char* queries, const char* keys, int first_token,
                    bool is_edge) {
    clear(scores);
    multiply_keys<S::kRowTiles, S::kWarpTokens>(queries, kQueryBytes, keys, scores);
    if (launch.softcap > 0.0f) cap(launch);
#pragma unroll
    for (int r = 0; r < S::kRowTiles; ++r) {
      if (is_edge) mask(launch, item, queries + 16 * r * kQueryBytes, first_token, scores[r]);
      rescale(launch, r);
    }
  }

  // Adds their values, weighted.
  DEVICE void add_values(const Launch& launch, const char* values) {
#pragma unroll
    for (int n = 0; n < S::kWarpTokens / 16; ++n) {
      u32 weights[S::kRowTiles][4];
#pragma unroll
      for (int i = 0; i < 4 * S::kRowTiles; ++i) weights[i / 4][i % 4] = weigh(launch, i / 4, 2 * n + i % 4 / 2, i & 1);
      multiply_values(weights, values + n * 16 * kPaddedBytes, sums);
    }
  }

  // A row's total over the four lanes that share it.
  DEVICE void reduce_totals() {
#pragma unroll
    for (auto& two : total) {
#pragma unroll
      for (float& sum : two) {
        sum += __shfl_xor_sync(kWholeWarp, sum, 1);
        sum += __shfl_xor_sync(kWholeWarp, sum, 2);
      }
    }
  }

 private:
  template <int kCount>
  DEVICE static void clear(float (&numbers)[S::kRowTiles][kCount][4]) {
#pragma unroll
    for (auto& row_tile : numbers) {
#pragma unroll
      for (auto& four : row_tile) four[0] = four[1] = four[2] = four[3] = 0.0f;
    }
  }

  // softcap * tanh(score * scale / softcap) / scale, from an exponential: the hardware's tanh is off by 2^-11.
  DEVICE void cap(const Launch& launch) {
    const float factor = 2.0f * 1.44269504f * launch.scale * reciprocal_approx(launch.softcap);
    const float limit = launch.softcap * reciprocal_approx(launch.scale);
#pragma unroll
    for (auto& row_tile : scores) {
#pragma unroll
      for (auto& four : row_tile) {
#pragma unroll
        for (float& score : four) {
          const float folded = reciprocal_approx(1.0f + exp2_approx(score * factor));
          score = fmaf(-2.0f * limit, folded, limit);
        }
      }
    }
  }

  DEVICE static void mask(const Launch& launch, const Item& item, char* queries, int first_token,
                          float (&scores)[S::kWarpTokens / 8][4]) {
    const int lane = lane_of_thread();
#pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
      const int position = position_of(queries, lane / 4 + 8 * half_row);
      const int end = min(item.kv_end, position + 1);
      const int begin = position + 1 - launch.window;
#pragma unroll
      for (int i = 0; i < S::kWarpTokens / 4; ++i) {
        const int token = first_token + i / 2 * 8 + (lane & 3) * 2 + i % 2;  // from the lane's first
        if (token < begin || token >= end) scores[i / 2][2 * half_row + i % 2] = kMasked;
      }
    }
  }

  // Raises the largest scores to those of this tile and scales down what was summed before.
  DEVICE void rescale(const Launch& launch, int r) {
    float most[2] = {largest[r][0], largest[r][1]};
#pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
      float& tops = most[half_row];
#pragma unroll
      for (const auto& four : scores[r]) tops = fmaxf(tops, fmaxf(four[2 * half_row], four[2 * half_row + 1]));
      tops = fmaxf(tops, __shfl_xor_sync(kWholeWarp, tops, 1));
      tops = fmaxf(tops, __shfl_xor_sync(kWholeWarp, tops, 2));
    }
    // Few tiles hold a row's largest score so far; in prefill there are no registers for a branch.
    const bool has_risen = most[0] > largest[r][0] || most[1] > largest[r][1];
    if (S::kIsDecode && !__any_sync(kWholeWarp, has_risen)) return;
#pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
      const float factor = exp2_approx((largest[r][half_row] - most[half_row]) * launch.scale);
      largest[r][half_row] = most[half_row];
      total[r][half_row] *= factor;
#pragma unroll
      for (auto& four : sums[r]) {
        four[2 * half_row] *= factor;
        four[2 * half_row + 1] *= factor;
      }
    }
  }

  // The weights of two neighbouring tokens as an operand.
  DEVICE u32 weigh(const Launch& launch, int r, int eight, int half_row) {
    const float(&four)[4] = scores[r][eight];
    // Nothing seen so far: masked scores must still weigh nothing.
    const float base = largest[r][half_row] == kMasked ? 0.0f : largest[r][half_row] * launch.scale;
    const float first = exp2_approx(fmaf(four[2 * half_row], launch.scale, -base));
    const float second = exp2_approx(fmaf(four[2 * half_row + 1], launch.scale, -base));
    total[r][half_row] += first + second;
    return pack<Operand>(first, second);
  }
};
