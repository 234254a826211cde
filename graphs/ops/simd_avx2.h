// AVX2 with FMA and F16C: 8 floats. See simd.h.
#pragma once

#include <immintrin.h>

namespace chairlift::CHAIRLIFT_SIMD_NS {

constexpr int kLanes = 8;
using Vec = __m256;

CHAIRLIFT_INLINE __m256i first_lanes(int n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

CHAIRLIFT_INLINE Vec zero() { return _mm256_setzero_ps(); }
CHAIRLIFT_INLINE Vec set1(float x) { return _mm256_set1_ps(x); }
CHAIRLIFT_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
CHAIRLIFT_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
CHAIRLIFT_INLINE Vec load_partial(const float* p, int n) { return _mm256_maskload_ps(p, first_lanes(n)); }
CHAIRLIFT_INLINE void store_partial(float* p, Vec v, int n) { _mm256_maskstore_ps(p, first_lanes(n), v); }

CHAIRLIFT_INLINE Vec add(Vec a, Vec b) { return _mm256_add_ps(a, b); }
CHAIRLIFT_INLINE Vec sub(Vec a, Vec b) { return _mm256_sub_ps(a, b); }
CHAIRLIFT_INLINE Vec mul(Vec a, Vec b) { return _mm256_mul_ps(a, b); }
CHAIRLIFT_INLINE Vec div(Vec a, Vec b) { return _mm256_div_ps(a, b); }
CHAIRLIFT_INLINE Vec reciprocal(Vec a) { return div(set1(1.0f), a); }
CHAIRLIFT_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
CHAIRLIFT_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
CHAIRLIFT_INLINE Vec sqrt(Vec a) { return _mm256_sqrt_ps(a); }
CHAIRLIFT_INLINE Vec abs(Vec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
CHAIRLIFT_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
CHAIRLIFT_INLINE Vec round(Vec a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
CHAIRLIFT_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
// 2^n for whole n in [-126, 127].
CHAIRLIFT_INLINE Vec power_of_two(Vec n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}

// v * 2^n for whole n <= 127; 0 for n < -126, because the exponent bits of 2^-127 are all zero.
CHAIRLIFT_INLINE Vec scale_by_power(Vec v, Vec n) { return mul(v, power_of_two(max(n, set1(-127.0f)))); }

CHAIRLIFT_INLINE float reduce_add(Vec v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}
CHAIRLIFT_INLINE float reduce_max(Vec v) {
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}
CHAIRLIFT_INLINE float reduce_min(Vec v) {
  const __m128 four = _mm_min_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_min_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_min_ss(two, _mm_movehdup_ps(two)));
}

CHAIRLIFT_INLINE Vec load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
CHAIRLIFT_INLINE void store_f16(uint16_t* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
CHAIRLIFT_INLINE Vec load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
CHAIRLIFT_INLINE __m128i to_i16(Vec v) {
  const __m256i words = _mm256_cvtps_epi32(v);
  return _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
}
CHAIRLIFT_INLINE void store_i8(int8_t* p, Vec v) {
  const __m128i shorts = to_i16(v);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packs_epi16(shorts, shorts));
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
