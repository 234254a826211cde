// AArch64 NEON: 4 floats. See simd.h.
#pragma once

#include <arm_neon.h>

namespace chairlift::CHAIRLIFT_SIMD_NS {

constexpr int kLanes = 4;
using Vec = float32x4_t;

CHAIRLIFT_INLINE Vec zero() { return vdupq_n_f32(0.0f); }
CHAIRLIFT_INLINE Vec set1(float x) { return vdupq_n_f32(x); }
CHAIRLIFT_INLINE Vec load(const float* p) { return vld1q_f32(p); }
CHAIRLIFT_INLINE void store(float* p, Vec v) { vst1q_f32(p, v); }
CHAIRLIFT_INLINE Vec load_partial(const float* p, int n) {
  float lanes[kLanes] = {};
  for (int i = 0; i < n; ++i) lanes[i] = p[i];
  return load(lanes);
}
CHAIRLIFT_INLINE void store_partial(float* p, Vec v, int n) {
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < n; ++i) p[i] = lanes[i];
}

CHAIRLIFT_INLINE Vec add(Vec a, Vec b) { return vaddq_f32(a, b); }
CHAIRLIFT_INLINE Vec sub(Vec a, Vec b) { return vsubq_f32(a, b); }
CHAIRLIFT_INLINE Vec mul(Vec a, Vec b) { return vmulq_f32(a, b); }
CHAIRLIFT_INLINE Vec div(Vec a, Vec b) { return vdivq_f32(a, b); }
CHAIRLIFT_INLINE Vec reciprocal(Vec a) { return div(set1(1.0f), a); }
CHAIRLIFT_INLINE Vec min(Vec a, Vec b) { return vminq_f32(a, b); }
CHAIRLIFT_INLINE Vec max(Vec a, Vec b) { return vmaxq_f32(a, b); }
CHAIRLIFT_INLINE Vec sqrt(Vec a) { return vsqrtq_f32(a); }
CHAIRLIFT_INLINE Vec abs(Vec a) { return vabsq_f32(a); }
CHAIRLIFT_INLINE Vec fma(Vec a, Vec b, Vec c) { return vfmaq_f32(c, a, b); }
CHAIRLIFT_INLINE Vec round(Vec a) { return vrndnq_f32(a); }
CHAIRLIFT_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) { return vbslq_f32(vcltq_f32(a, b), x, y); }
// 2^n for whole n in [-126, 127].
CHAIRLIFT_INLINE Vec power_of_two(Vec n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}

// v * 2^n for whole n <= 127; 0 for n < -126, because the exponent bits of 2^-127 are all zero.
CHAIRLIFT_INLINE Vec scale_by_power(Vec v, Vec n) { return mul(v, power_of_two(max(n, set1(-127.0f)))); }

CHAIRLIFT_INLINE float reduce_add(Vec v) { return vaddvq_f32(v); }
CHAIRLIFT_INLINE float reduce_max(Vec v) { return vmaxvq_f32(v); }
CHAIRLIFT_INLINE float reduce_min(Vec v) { return vminvq_f32(v); }

CHAIRLIFT_INLINE Vec load_f16(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
CHAIRLIFT_INLINE void store_f16(uint16_t* p, Vec v) { vst1_u16(p, vreinterpret_u16_f16(vcvt_f16_f32(v))); }
CHAIRLIFT_INLINE Vec load_i8(const int8_t* p) {
  int32_t word;
  std::memcpy(&word, p, sizeof(word));
  const int16x8_t shorts = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(word)));
  return vcvtq_f32_s32(vmovl_s16(vget_low_s16(shorts)));
}
CHAIRLIFT_INLINE void store_i8(int8_t* p, Vec v) {
  const int16x4_t shorts = vqmovn_s32(vcvtnq_s32_f32(v));
  const int32_t word = vget_lane_s32(vreinterpret_s32_s8(vqmovn_s16(vcombine_s16(shorts, shorts))), 0);
  std::memcpy(p, &word, sizeof(word));
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
