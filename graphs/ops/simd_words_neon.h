// AArch64 NEON: 4 words. See simd_words.h.
#pragma once

namespace chairlift::CHAIRLIFT_SIMD_NS {

using Words = uint32x4_t;

CHAIRLIFT_INLINE Words words(uint32_t x) { return vdupq_n_u32(x); }
CHAIRLIFT_INLINE Words load_words(const void* p) { return vld1q_u32(static_cast<const uint32_t*>(p)); }
CHAIRLIFT_INLINE void store_words(void* p, Words v) { vst1q_u32(static_cast<uint32_t*>(p), v); }
CHAIRLIFT_INLINE Words load_words_partial(const void* p, int n) {
  uint32_t lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(n) * sizeof(uint32_t));
  return vld1q_u32(lanes);
}
CHAIRLIFT_INLINE Words add(Words a, Words b) { return vaddq_u32(a, b); }
CHAIRLIFT_INLINE Words sub(Words a, Words b) { return vsubq_u32(a, b); }
CHAIRLIFT_INLINE Words mul(Words a, Words b) { return vmulq_u32(a, b); }
CHAIRLIFT_INLINE Words xor_words(Words a, Words b) { return veorq_u32(a, b); }
template <int n>
CHAIRLIFT_INLINE Words shift_right(Words a) {
  return vshrq_n_u32(a, n);
}
CHAIRLIFT_INLINE void mul_wide(Words a, Words b, Words* high, Words* low) {
  const uint32x4_t first = vreinterpretq_u32_u64(vmull_u32(vget_low_u32(a), vget_low_u32(b)));
  const uint32x4_t second = vreinterpretq_u32_u64(vmull_high_u32(a, b));
  *low = vuzp1q_u32(first, second);
  *high = vuzp2q_u32(first, second);
}
CHAIRLIFT_INLINE Vec to_float(Words a) { return vcvtq_f32_s32(vreinterpretq_s32_u32(a)); }
CHAIRLIFT_INLINE Words round_words(Vec a) { return vreinterpretq_u32_s32(vcvtnq_s32_f32(a)); }
CHAIRLIFT_INLINE uint32_t less_mask(Vec a, Vec b) {
  const uint32x4_t bits = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vcltq_f32(a, b), bits));
}
CHAIRLIFT_INLINE void pack_store(uint32_t* p, Words v, uint32_t mask) {
  uint32_t lanes[kLanes];
  vst1q_u32(lanes, v);
  int n = 0;
  for (int i = 0; i < kLanes; ++i) {
    if ((mask >> i) & 1u) p[n++] = lanes[i];
  }
}
CHAIRLIFT_INLINE void pack_store(float* p, Vec v, uint32_t mask) {
  float lanes[kLanes];
  store(lanes, v);
  int n = 0;
  for (int i = 0; i < kLanes; ++i) {
    if ((mask >> i) & 1u) p[n++] = lanes[i];
  }
}
CHAIRLIFT_INLINE Words lane_numbers() {
  const uint32x4_t numbers = {0, 1, 2, 3};
  return numbers;
}
CHAIRLIFT_INLINE Vec keep_lanes(Vec v, int n) {
  const uint32x4_t mask = vcltq_u32(lane_numbers(), vdupq_n_u32(static_cast<uint32_t>(n)));
  return vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(v), mask));
}
CHAIRLIFT_INLINE void interleave_quads(Words w[4]) {
  const uint32x4_t a = vzip1q_u32(w[0], w[2]);
  const uint32x4_t b = vzip1q_u32(w[1], w[3]);
  const uint32x4_t c = vzip2q_u32(w[0], w[2]);
  const uint32x4_t d = vzip2q_u32(w[1], w[3]);
  w[0] = vzip1q_u32(a, b);
  w[1] = vzip2q_u32(a, b);
  w[2] = vzip1q_u32(c, d);
  w[3] = vzip2q_u32(c, d);
}
CHAIRLIFT_INLINE Words quad_order() { return lane_numbers(); }
CHAIRLIFT_INLINE void store_bytes(uint8_t* p, const Words (&w)[4]) {
  int16x4_t shorts[4];
  for (int i = 0; i < 4; ++i) shorts[i] = vqmovn_s32(vreinterpretq_s32_u32(w[i]));
  vst1_u8(p, vqmovun_s16(vcombine_s16(shorts[0], shorts[1])));
  vst1_u8(p + 2 * kLanes, vqmovun_s16(vcombine_s16(shorts[2], shorts[3])));
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
