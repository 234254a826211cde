// AVX-512 (F, BW, DQ, VL): 16 floats. See simd.h.
#pragma once

#include <immintrin.h>

namespace chairlift::CHAIRLIFT_SIMD_NS {

constexpr int kLanes = 16;
using Vec = __m512;

CHAIRLIFT_INLINE __mmask16 first_lanes(int n) { return static_cast<__mmask16>((1u << n) - 1u); }

CHAIRLIFT_INLINE Vec zero() { return _mm512_setzero_ps(); }
CHAIRLIFT_INLINE Vec set1(float x) { return _mm512_set1_ps(x); }
CHAIRLIFT_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
CHAIRLIFT_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
CHAIRLIFT_INLINE Vec load_partial(const float* p, int n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
CHAIRLIFT_INLINE void store_partial(float* p, Vec v, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }

CHAIRLIFT_INLINE Vec add(Vec a, Vec b) { return _mm512_add_ps(a, b); }
CHAIRLIFT_INLINE Vec sub(Vec a, Vec b) { return _mm512_sub_ps(a, b); }
CHAIRLIFT_INLINE Vec mul(Vec a, Vec b) { return _mm512_mul_ps(a, b); }
CHAIRLIFT_INLINE Vec div(Vec a, Vec b) { return _mm512_div_ps(a, b); }
CHAIRLIFT_INLINE Vec reciprocal(Vec a) {  // 14 bits, then one step of Newton's method
  const Vec r = _mm512_rcp14_ps(a);
  return _mm512_fmadd_ps(r, _mm512_fnmadd_ps(a, r, _mm512_set1_ps(1.0f)), r);
}
CHAIRLIFT_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
CHAIRLIFT_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
CHAIRLIFT_INLINE Vec sqrt(Vec a) { return _mm512_sqrt_ps(a); }
CHAIRLIFT_INLINE Vec abs(Vec a) { return _mm512_abs_ps(a); }
CHAIRLIFT_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
CHAIRLIFT_INLINE Vec round(Vec a) {
  return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
CHAIRLIFT_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) {
  return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
// v * 2^n for whole n <= 127; 0 for n < -126.
CHAIRLIFT_INLINE Vec scale_by_power(Vec v, Vec n) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(n, _mm512_set1_ps(-126.0f), _CMP_GE_OQ), v, n);
}

CHAIRLIFT_INLINE float reduce_add(Vec v) { return _mm512_reduce_add_ps(v); }
CHAIRLIFT_INLINE float reduce_max(Vec v) { return _mm512_reduce_max_ps(v); }
CHAIRLIFT_INLINE float reduce_min(Vec v) { return _mm512_reduce_min_ps(v); }

CHAIRLIFT_INLINE Vec load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
CHAIRLIFT_INLINE void store_f16(uint16_t* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}
CHAIRLIFT_INLINE Vec load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
CHAIRLIFT_INLINE void store_i8(int8_t* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(v)));
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
