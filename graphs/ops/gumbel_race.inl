// Choosing the token with the largest z + noise. Part of sample_kernel.inl.
#pragma once

#include <math.h>

#include "philox.h"
#include "sample_kernel.h"
#include "sample_select.inl"

namespace chairlift::CHAIRLIFT_SIMD_NS {
namespace {

// The largest Gumbel number of 24 random bits is -log(-log(1 - 2^-25)) = 17.33: what lies further below the best score
// cannot win.
constexpr double kLargestNoise = 17.34;

// Adds noise to the tokens of one row and remembers the best.
class GumbelRace {
 public:
  GumbelRace(const Row& row, uint64_t seed, uint32_t position)
      : row_(row), key_(philox_key(seed)), position_(position) {}

  int32_t winner() const { return winner_; }
  float z_floor() const { return z_floor_; }  // tokens below it cannot win any more

  // 4 * kLanes tokens from `first` on, a multiple of 4; those in masks[i] take part.
  void run_dense(const float* masses, const uint32_t masks[4], int32_t first) {
    Words bits[4];
    philox(key_, add(words(static_cast<uint32_t>(first) >> 2), quad_order()), position_, bits);
    interleave_quads(bits);
    for (int i = 0; i < 4; ++i) {
      const int32_t base = first + i * kLanes;
      compare(load(masses + i * kLanes), bits[i], masks[i], [=](int lane) { return base + lane; });
    }
  }

  // Tokens that come few at a time, at most kLanes of the 4 * kLanes, wait until a vector is full.
  void add_sparse(const float* masses, const uint32_t masks[4], int32_t first) {
    for (int i = 0; i < 4; ++i) {
      const int32_t base = first + i * kLanes;
      pack_store(waiting_masses_ + num_waiting_, load(masses + i * kLanes), masks[i]);
      pack_store(waiting_tokens_ + num_waiting_, add(words(static_cast<uint32_t>(base)), lane_numbers()), masks[i]);
      num_waiting_ += __builtin_popcount(masks[i]);
    }
    if (num_waiting_ >= kLanes) run_waiting();
  }

  // Runs the first kLanes of those that wait, or all if there are fewer.
  void run_waiting() {
    const int count = num_waiting_ < kLanes ? num_waiting_ : kLanes;
    Words random[4];
    philox(key_, shift_right<2>(load_words(waiting_tokens_)), position_, random);
    uint32_t lanes[4][kLanes];
    for (int i = 0; i < 4; ++i) store_words(lanes[i], random[i]);
    uint32_t bits[kLanes];
    for (int i = 0; i < kLanes; ++i) bits[i] = lanes[waiting_tokens_[i] & 3][i];
    compare(load(waiting_masses_), load_words(bits), (1u << count) - 1u,
            [this](int lane) { return static_cast<int32_t>(waiting_tokens_[lane]); });
    store(waiting_masses_, load(waiting_masses_ + kLanes));
    store_words(waiting_tokens_, load_words(waiting_tokens_ + kLanes));
    num_waiting_ -= count;
  }

 private:
  template <class TokenOf>
  __attribute__((always_inline)) void compare(Vec masses, Words bits, uint32_t mask, const TokenOf& token_of) {
    const Vec rest = to_float(shift_right<8>(xor_words(bits, words(0xffffffffu))));  // (1 - u) * 2^24, rounded down
    mask &= less_mask(rest, mul(masses, set1(limit_)));
    if (mask == 0) return;
    uint32_t bit_lanes[kLanes];
    store_words(bit_lanes, bits);
    for (; mask != 0; mask &= mask - 1) {
      const int lane = __builtin_ctz(mask);
      consider(token_of(lane), bit_lanes[lane]);
    }
  }

  void consider(int32_t token, uint32_t bits) {
    const double u = (static_cast<double>(bits >> 8) + 0.5) * 0x1p-24;
    const double score = static_cast<double>(row_.z_of(token)) - ::log(-::log(u));
    if (score < score_ || (score == score_ && token > winner_)) return;
    score_ = score;
    winner_ = token;
    limit_ = static_cast<float>(0x1p24 * 1.0001 * ::exp(-score));  // with room for the errors of float32
    z_floor_ = static_cast<float>(score - kLargestNoise);
  }

  const Row& row_;
  PhiloxKey key_;
  uint32_t position_;
  double score_ = -__builtin_inf();
  int32_t winner_ = kNoUsableLogit;
  float limit_ = kInfinity;  // only a token with (1 - u) * 2^24 < mass * limit_ may beat the score
  float z_floor_ = kLowestFinite;
  float waiting_masses_[3 * kLanes] = {};
  uint32_t waiting_tokens_[3 * kLanes] = {};
  int num_waiting_ = 0;
};

}  // namespace
}  // namespace chairlift::CHAIRLIFT_SIMD_NS
