// The running softmax of 16 packed rows in the registers of one warp: scores, masks, weights and weighted values.
#pragma once

#include "attention_item.cuh"

// The softmax of 16 rows, of which a lane keeps two: lane / 4 and the one 8 further.
template <int kRowWarps>
struct Softmax {
  using S = Shape<kRowWarps>;

  float scores[S::kWarpTokens / 8][4];  // of the tile at hand
  float sums[kHeadDim / 8][4];          // weighted values
  float largest[2];                     // scores, before `exponent_scale`
  float total[2];                       // of this lane's weights
  float exponent_scale;                 // score -> exponent of two

  DEVICE explicit Softmax(const Launch& launch)
      : largest{kMasked, kMasked}, total{0.0f, 0.0f}, exponent_scale(launch.softcap > 0.0f ? 1.0f : launch.scale) {
#pragma unroll
    for (auto& four : sums) four[0] = four[1] = four[2] = four[3] = 0.0f;
  }

  // Begins with this warp's tokens of a tile: their scores. `keys`: their rows.
  DEVICE void score(const Launch& launch, const Item& item, const char* queries, const char* keys, int first_row,
                    int first_token, bool is_edge) {
#pragma unroll
    for (auto& four : scores) four[0] = four[1] = four[2] = four[3] = 0.0f;
    multiply_keys<S::kWarpTokens>(queries, kQueryBytes, keys, scores);
    if (launch.softcap > 0.0f) cap(launch);
    if (is_edge) mask(launch, item, first_row, first_token);
    rescale();
  }

  // Adds their values, weighted.
  DEVICE void add_values(const char* values) {
#pragma unroll
    for (int n = 0; n < S::kWarpTokens / 16; ++n) {
      u32 weights[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) weights[i] = weigh(scores[2 * n + i / 2], i & 1);
      multiply_values(weights, values + n * 16 * kPaddedBytes, sums);
    }
  }

  // A row's total over the four lanes that share it.
  DEVICE void reduce_totals() {
#pragma unroll
    for (float& sum : total) {
      sum += __shfl_xor_sync(kWholeWarp, sum, 1);
      sum += __shfl_xor_sync(kWholeWarp, sum, 2);
    }
  }

 private:
  // softcap * tanh(score * scale / softcap), from an exponential: the hardware's tanh is off by 2^-11.
  DEVICE void cap(const Launch& launch) {
    const float factor = 2.0f * 1.44269504f * launch.scale / launch.softcap;
#pragma unroll
    for (auto& four : scores) {
#pragma unroll
      for (float& score : four) {
        const float folded = reciprocal_approx(1.0f + exp2_approx(score * factor));
        score = fmaf(-2.0f * launch.softcap, folded, launch.softcap);
      }
    }
  }

  DEVICE void mask(const Launch& launch, const Item& item, int first_row, int first_token) {
    const int lane = lane_of_thread();
#pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
      const int position = item.position(launch, first_row + lane / 4 + 8 * half_row);
      const int end = min(item.kv_end, position + 1);
      const int begin = position + 1 - launch.window;
#pragma unroll
      for (int n = 0; n < S::kWarpTokens / 8; ++n) {
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const int token = first_token + n * 8 + (lane & 3) * 2 + j;
          if (token < begin || token >= end) scores[n][2 * half_row + j] = kMasked;
        }
      }
    }
  }

  // Raises the largest scores to those of this tile and scales down what was summed before.
  DEVICE void rescale() {
#pragma unroll
    for (int half_row = 0; half_row < 2; ++half_row) {
      float most = largest[half_row];
#pragma unroll
      for (const auto& four : scores) most = fmaxf(most, fmaxf(four[2 * half_row], four[2 * half_row + 1]));
      most = fmaxf(most, __shfl_xor_sync(kWholeWarp, most, 1));
      most = fmaxf(most, __shfl_xor_sync(kWholeWarp, most, 2));
      const float factor = exp2_approx((largest[half_row] - most) * exponent_scale);
      largest[half_row] = most;
      total[half_row] *= factor;
#pragma unroll
      for (auto& four : sums) {
        four[2 * half_row] *= factor;
        four[2 * half_row + 1] *= factor;
      }
    }
  }

  // The weights of two neighbouring tokens as an operand.
  DEVICE u32 weigh(const float (&four)[4], int half_row) {
    // Nothing seen so far: masked scores must still weigh nothing.
    const float base = largest[half_row] == kMasked ? 0.0f : largest[half_row] * exponent_scale;
    const float first = exp2_approx(fmaf(four[2 * half_row], exponent_scale, -base));
    const float second = exp2_approx(fmaf(four[2 * half_row + 1], exponent_scale, -base));
    total[half_row] += first + second;
    return pack<Operand>(first, second);
  }
};
