// AVX-512 VNNI: one instruction multiplies 16 columns by four channels and adds them up. See simd_dot.h.
#pragma once

namespace chairlift::CHAIRLIFT_SIMD_NS {

constexpr int kDotColumns = 16;
constexpr int kStripRows = 6;
constexpr int tile_vectors(int) { return 4; }  // 24 sums, 4 weights and a row of the 32 registers
constexpr int kDotOffset = 0;
constexpr int kDotCopied = 64;

using DotInput = uint8_t;
using DotWeights = __m512i;
using DotRow = __m512i;
using DotSums = __m512i;

CHAIRLIFT_INLINE void dot_copy(const uint8_t* q, DotInput* out) {
  _mm512_storeu_si512(out, _mm512_loadu_si512(q));
}
CHAIRLIFT_INLINE DotWeights dot_load(const int8_t* p) { return _mm512_loadu_si512(p); }
CHAIRLIFT_INLINE DotRow dot_broadcast(const DotInput* p) {
  int32_t four;
  std::memcpy(&four, p, sizeof(four));
  return _mm512_set1_epi32(four);
}
CHAIRLIFT_INLINE DotSums dot_zero() { return _mm512_setzero_si512(); }
CHAIRLIFT_INLINE void dot(DotSums* sums, DotRow row, DotWeights weights) {
  *sums = _mm512_dpbusd_epi32(*sums, row, weights);
}
template <int n>
CHAIRLIFT_INLINE void dot_store(int32_t* p, const DotSums (&sums)[n]) {
  for (int i = 0; i < n; ++i) _mm512_storeu_si512(p + i * kDotColumns, sums[i]);
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
