// Plain C++: 8 floats in an array; compilers turn the loops into whatever the base instruction set has. See simd.h.
#pragma once

#include <cmath>

namespace chairlift::CHAIRLIFT_SIMD_NS {

constexpr int kLanes = 8;
struct Vec {
  float v[kLanes];
};

#define CHAIRLIFT_EACH_LANE(expression)                 \
  Vec r;                                                \
  for (int i = 0; i < kLanes; ++i) r.v[i] = expression; \
  return r

CHAIRLIFT_INLINE float float_of(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

CHAIRLIFT_INLINE float f16_to_f32(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const bool is_finite = bits < 0x0f800000u;
  // The product moves the exponent from bias 15 to bias 127; exact, subnormals included.
  const float magnitude = is_finite ? float_of(bits) * 0x1p112f : float_of(bits | 0x7f800000u);
  return (h & 0x8000u) != 0 ? -magnitude : magnitude;
}

// Rounds half to even; overflow gives infinity.
CHAIRLIFT_INLINE uint16_t f32_to_f16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  bits &= 0x7fffffffu;
  if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);  // NaN
  if (bits >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);
  if (bits < 0x38800000u) {  // subnormal: adding 0.5 lets the addition do the rounding at 2^-24
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof(magnitude));
    magnitude += 0.5f;
    std::memcpy(&bits, &magnitude, sizeof(bits));
    return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
  }
  bits += 0xfffu + ((bits >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((bits - 0x38000000u) >> 13));
}

CHAIRLIFT_INLINE Vec set1(float x) { CHAIRLIFT_EACH_LANE(x); }
CHAIRLIFT_INLINE Vec zero() { return set1(0.0f); }
CHAIRLIFT_INLINE Vec load(const float* p) { CHAIRLIFT_EACH_LANE(p[i]); }
CHAIRLIFT_INLINE void store(float* p, Vec a) {
  for (int i = 0; i < kLanes; ++i) p[i] = a.v[i];
}
CHAIRLIFT_INLINE Vec load_partial(const float* p, int n) { CHAIRLIFT_EACH_LANE(i < n ? p[i] : 0.0f); }
CHAIRLIFT_INLINE void store_partial(float* p, Vec a, int n) {
  for (int i = 0; i < n; ++i) p[i] = a.v[i];
}

CHAIRLIFT_INLINE Vec add(Vec a, Vec b) { CHAIRLIFT_EACH_LANE(a.v[i] + b.v[i]); }
CHAIRLIFT_INLINE Vec sub(Vec a, Vec b) { CHAIRLIFT_EACH_LANE(a.v[i] - b.v[i]); }
CHAIRLIFT_INLINE Vec mul(Vec a, Vec b) { CHAIRLIFT_EACH_LANE(a.v[i] * b.v[i]); }
CHAIRLIFT_INLINE Vec div(Vec a, Vec b) { CHAIRLIFT_EACH_LANE(a.v[i] / b.v[i]); }
CHAIRLIFT_INLINE Vec reciprocal(Vec a) { return div(set1(1.0f), a); }
CHAIRLIFT_INLINE Vec min(Vec a, Vec b) { CHAIRLIFT_EACH_LANE(a.v[i] < b.v[i] ? a.v[i] : b.v[i]); }
CHAIRLIFT_INLINE Vec max(Vec a, Vec b) { CHAIRLIFT_EACH_LANE(a.v[i] > b.v[i] ? a.v[i] : b.v[i]); }
CHAIRLIFT_INLINE Vec sqrt(Vec a) { CHAIRLIFT_EACH_LANE(__builtin_sqrtf(a.v[i])); }
CHAIRLIFT_INLINE Vec abs(Vec a) { CHAIRLIFT_EACH_LANE(__builtin_fabsf(a.v[i])); }
CHAIRLIFT_INLINE Vec fma(Vec a, Vec b, Vec c) { CHAIRLIFT_EACH_LANE(a.v[i] * b.v[i] + c.v[i]); }
// Half to even: adding and taking away 1.5 * 2^23 leaves no fraction bits; larger magnitudes have none to begin with.
CHAIRLIFT_INLINE Vec round(Vec a) {
  CHAIRLIFT_EACH_LANE(__builtin_fabsf(a.v[i]) < 0x1p22f ? (a.v[i] + 0x1.8p23f) - 0x1.8p23f : a.v[i]);
}
CHAIRLIFT_INLINE Vec select_less(Vec a, Vec b, Vec x, Vec y) { CHAIRLIFT_EACH_LANE(a.v[i] < b.v[i] ? x.v[i] : y.v[i]); }
// 2^n for whole n in [-126, 127].
CHAIRLIFT_INLINE Vec power_of_two(Vec n) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) {
    const uint32_t bits = static_cast<uint32_t>(static_cast<int32_t>(n.v[i]) + 127) << 23;
    std::memcpy(&r.v[i], &bits, sizeof(bits));
  }
  return r;
}

// v * 2^n for whole n <= 127; 0 for n < -126, because the exponent bits of 2^-127 are all zero.
CHAIRLIFT_INLINE Vec scale_by_power(Vec v, Vec n) { return mul(v, power_of_two(max(n, set1(-127.0f)))); }

CHAIRLIFT_INLINE float reduce_add(Vec a) {
  return ((a.v[0] + a.v[4]) + (a.v[2] + a.v[6])) + ((a.v[1] + a.v[5]) + (a.v[3] + a.v[7]));
}
CHAIRLIFT_INLINE float reduce_max(Vec a) {
  float r = a.v[0];
  for (int i = 1; i < kLanes; ++i) r = a.v[i] > r ? a.v[i] : r;
  return r;
}
CHAIRLIFT_INLINE float reduce_min(Vec a) {
  float r = a.v[0];
  for (int i = 1; i < kLanes; ++i) r = a.v[i] < r ? a.v[i] : r;
  return r;
}

CHAIRLIFT_INLINE Vec load_f16(const uint16_t* p) { CHAIRLIFT_EACH_LANE(f16_to_f32(p[i])); }
CHAIRLIFT_INLINE void store_f16(uint16_t* p, Vec a) {
  for (int i = 0; i < kLanes; ++i) p[i] = f32_to_f16(a.v[i]);
}
CHAIRLIFT_INLINE Vec load_i8(const int8_t* p) { CHAIRLIFT_EACH_LANE(static_cast<float>(p[i])); }
CHAIRLIFT_INLINE void store_i8(int8_t* p, Vec a) {
  for (int i = 0; i < kLanes; ++i) p[i] = static_cast<int8_t>(static_cast<int32_t>(a.v[i]));
}

#undef CHAIRLIFT_EACH_LANE

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
