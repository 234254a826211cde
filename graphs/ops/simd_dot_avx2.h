// AVX2 multiplies u8 x s8 with sums that saturate at 16 bits, so both are widened to 16 bits. See simd_dot.h.
#pragma once

namespace chairlift::CHAIRLIFT_SIMD_NS {

constexpr int kDotColumns = 4;
constexpr int kStripRows = 6;
// 12 sums, 2 weights and 2 more fill the 16 registers. Whole panels, where they fit, are read in one go.
constexpr int tile_vectors(int num_rows) { return num_rows <= 2 ? 4 : 2; }
constexpr int kDotOffset = 0;
constexpr int kDotCopied = 16;

using DotInput = int16_t;
using DotWeights = __m256i;  // 16 bits each: 4 columns x 4 channels
using DotRow = __m256i;
using DotSums = __m256i;  // two partial sums for each column, side by side

CHAIRLIFT_INLINE void dot_copy(const uint8_t* q, DotInput* out) {
  const __m256i wide = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(q)));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), wide);
}
CHAIRLIFT_INLINE DotWeights dot_load(const int8_t* p) {
  return _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
CHAIRLIFT_INLINE DotRow dot_broadcast(const DotInput* p) {
  long long four;
  std::memcpy(&four, p, sizeof(four));
  return _mm256_set1_epi64x(four);
}
CHAIRLIFT_INLINE DotSums dot_zero() { return _mm256_setzero_si256(); }
CHAIRLIFT_INLINE void dot(DotSums* sums, DotRow row, DotWeights weights) {
  // As one block, in place: GCC 12 would begin with the products of all rows, and run out of registers.
  __m256i products;
  __asm__ volatile(
      "vpmaddwd %[weights], %[row], %[products]\n\t"
      "vpaddd %[products], %[sums], %[sums]"
      : [sums] "+x"(*sums), [products] "=&x"(products)
      : [row] "x"(row), [weights] "x"(weights));
}
template <int n>
CHAIRLIFT_INLINE void dot_store(int32_t* p, const DotSums (&sums)[n]) {
  static_assert(n % 2 == 0);
  for (int i = 0; i < n; i += 2) {
    // hadd yields columns 0 1 4 5 | 2 3 6 7.
    const __m256i pairs = _mm256_hadd_epi32(sums[i], sums[i + 1]);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + i * kDotColumns), _mm256_permute4x64_epi64(pairs, 0xd8));
  }
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
