// Arm's dot products (SDOT) multiply s8 x s8, so activations are shifted down by 128. See simd_dot.h.
#pragma once

namespace chairlift::CHAIRLIFT_SIMD_NS {

constexpr int kDotColumns = 4;
constexpr int kStripRows = 6;
constexpr int tile_vectors(int) { return 4; }  // a panel: 24 sums, 4 weights and a row of the 32 registers
constexpr int kDotOffset = 128;
constexpr int kDotCopied = 16;

using DotInput = int8_t;
using DotWeights = int8x16_t;
using DotRow = int8x16_t;
using DotSums = int32x4_t;

CHAIRLIFT_INLINE void dot_copy(const uint8_t* q, DotInput* out) {
  vst1q_s8(out, vreinterpretq_s8_u8(veorq_u8(vld1q_u8(q), vdupq_n_u8(0x80))));
}
CHAIRLIFT_INLINE DotWeights dot_load(const int8_t* p) { return vld1q_s8(p); }
CHAIRLIFT_INLINE DotRow dot_broadcast(const DotInput* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof(four));
  return vreinterpretq_s8_s32(vdupq_n_s32(four));
}
CHAIRLIFT_INLINE DotSums dot_zero() { return vdupq_n_s32(0); }
CHAIRLIFT_INLINE void dot(DotSums* sums, DotRow row, DotWeights weights) { *sums = vdotq_s32(*sums, weights, row); }
template <int n>
CHAIRLIFT_INLINE void dot_store(int32_t* p, const DotSums (&sums)[n]) {
  for (int i = 0; i < n; ++i) vst1q_s32(p + i * kDotColumns, sums[i]);
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
