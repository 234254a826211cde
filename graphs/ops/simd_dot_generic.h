// Plain C++. See simd_dot.h.
#pragma once

namespace chairlift::CHAIRLIFT_SIMD_NS {

constexpr int kDotColumns = 8;
constexpr int kStripRows = 2;
constexpr int tile_vectors(int) { return 2; }
constexpr int kDotOffset = 0;
constexpr int kDotCopied = 4;

using DotInput = int16_t;
struct DotWeights {
  int16_t v[4 * kDotColumns];
};
struct DotRow {
  int16_t v[4];
};
struct DotSums {
  int32_t v[kDotColumns];
};

CHAIRLIFT_INLINE void dot_copy(const uint8_t* q, DotInput* out) {
  for (int i = 0; i < kDotCopied; ++i) out[i] = q[i];
}
CHAIRLIFT_INLINE DotWeights dot_load(const int8_t* p) {
  DotWeights weights;
  for (int i = 0; i < 4 * kDotColumns; ++i) weights.v[i] = p[i];
  return weights;
}
CHAIRLIFT_INLINE DotRow dot_broadcast(const DotInput* p) {
  DotRow row;
  std::memcpy(row.v, p, sizeof(row.v));
  return row;
}
CHAIRLIFT_INLINE DotSums dot_zero() { return DotSums{}; }
CHAIRLIFT_INLINE void dot(DotSums* sums, const DotRow& row, const DotWeights& weights) {
  for (int column = 0; column < kDotColumns; ++column) {
    for (int i = 0; i < 4; ++i) sums->v[column] += row.v[i] * weights.v[4 * column + i];
  }
}
template <int n>
CHAIRLIFT_INLINE void dot_store(int32_t* p, const DotSums (&sums)[n]) {
  std::memcpy(p, sums, sizeof(sums));
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
