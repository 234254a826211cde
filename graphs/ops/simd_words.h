// Vectors of kLanes 32-bit words beside the floats of simd.h, lane masks, and packing lanes together. Include simd.h first.
//
// `Words` wraps around like uint32_t. All functions below exist in each set:
//   words(x) load_words(p) store_words(p, v) load_words_partial(p, n)
//   add sub mul xor_words shift_right<n>               lane by lane; mul yields the low half
//   mul_wide(a, b, &high, &low)                        all 64 bits of the unsigned products
//   to_float(v)                                        of signed words
//   less_mask(a, b)                                    bit i: a[i] < b[i]
//   pack_store(p, v, mask)                             the lanes in `mask` one after the other; the rest of
//                                                      p[0..kLanes) is overwritten with anything
//   interleave_quads(w)                                w[0..4): afterwards word 4i + j of the four vectors, one after the
//                                                      other, is what lane l of w[j] was, where quad_order()[l] = i
#pragma once

#if defined(CHAIRLIFT_SIMD_AVX512)

namespace chairlift::CHAIRLIFT_SIMD_NS {

using Words = __m512i;

CHAIRLIFT_INLINE Words words(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
CHAIRLIFT_INLINE Words load_words(const void* p) { return _mm512_loadu_si512(p); }
CHAIRLIFT_INLINE void store_words(void* p, Words v) { _mm512_storeu_si512(p, v); }
CHAIRLIFT_INLINE Words load_words_partial(const void* p, int n) { return _mm512_maskz_loadu_epi32(first_lanes(n), p); }
CHAIRLIFT_INLINE Words add(Words a, Words b) { return _mm512_add_epi32(a, b); }
CHAIRLIFT_INLINE Words sub(Words a, Words b) { return _mm512_sub_epi32(a, b); }
CHAIRLIFT_INLINE Words mul(Words a, Words b) { return _mm512_mullo_epi32(a, b); }
CHAIRLIFT_INLINE Words xor_words(Words a, Words b) { return _mm512_xor_si512(a, b); }
template <int n>
CHAIRLIFT_INLINE Words shift_right(Words a) {
  return _mm512_srli_epi32(a, n);
}
CHAIRLIFT_INLINE void mul_wide(Words a, Words b, Words* high, Words* low) {
  const __m512i even = _mm512_mul_epu32(a, b);
  const __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a, 32), _mm512_srli_epi64(b, 32));
  *high = _mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
  *low = _mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
}
CHAIRLIFT_INLINE Vec to_float(Words a) { return _mm512_cvtepi32_ps(a); }
CHAIRLIFT_INLINE uint32_t less_mask(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
CHAIRLIFT_INLINE void pack_store(float* p, Vec v, uint32_t mask) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), v));
}
// Transposes 4 x 4 words within each 128-bit part.
CHAIRLIFT_INLINE void interleave_quads(Words w[4]) {
  const Words a = _mm512_unpacklo_epi32(w[0], w[1]);
  const Words b = _mm512_unpacklo_epi32(w[2], w[3]);
  const Words c = _mm512_unpackhi_epi32(w[0], w[1]);
  const Words d = _mm512_unpackhi_epi32(w[2], w[3]);
  w[0] = _mm512_unpacklo_epi64(a, b);
  w[1] = _mm512_unpackhi_epi64(a, b);
  w[2] = _mm512_unpacklo_epi64(c, d);
  w[3] = _mm512_unpackhi_epi64(c, d);
}
CHAIRLIFT_INLINE Words quad_order() { return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }

}  // namespace chairlift::CHAIRLIFT_SIMD_NS

#elif defined(CHAIRLIFT_SIMD_AVX2)

namespace chairlift::CHAIRLIFT_SIMD_NS {

using Words = __m256i;

CHAIRLIFT_INLINE Words words(uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
CHAIRLIFT_INLINE Words load_words(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
CHAIRLIFT_INLINE void store_words(void* p, Words v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
CHAIRLIFT_INLINE Words load_words_partial(const void* p, int n) {
  return _mm256_maskload_epi32(static_cast<const int*>(p), first_lanes(n));
}
CHAIRLIFT_INLINE Words add(Words a, Words b) { return _mm256_add_epi32(a, b); }
CHAIRLIFT_INLINE Words sub(Words a, Words b) { return _mm256_sub_epi32(a, b); }
CHAIRLIFT_INLINE Words mul(Words a, Words b) { return _mm256_mullo_epi32(a, b); }
CHAIRLIFT_INLINE Words xor_words(Words a, Words b) { return _mm256_xor_si256(a, b); }
template <int n>
CHAIRLIFT_INLINE Words shift_right(Words a) {
  return _mm256_srli_epi32(a, n);
}
CHAIRLIFT_INLINE void mul_wide(Words a, Words b, Words* high, Words* low) {
  const __m256i even = _mm256_mul_epu32(a, b);
  const __m256i odd = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32));
  *high = _mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
  *low = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
}
CHAIRLIFT_INLINE Vec to_float(Words a) { return _mm256_cvtepi32_ps(a); }
CHAIRLIFT_INLINE uint32_t less_mask(Vec a, Vec b) {
  return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ)));
}

// For each mask of 8 lanes, which lanes come first.
struct PackTable {
  uint8_t lanes[256][8];
};
constexpr PackTable make_pack_table() {
  PackTable table{};
  for (int mask = 0; mask < 256; ++mask) {
    int n = 0;
    for (uint8_t lane = 0; lane < 8; ++lane) {
      if ((mask >> lane) & 1) table.lanes[mask][n++] = lane;
    }
  }
  return table;
}
alignas(64) constexpr PackTable kPackTable = make_pack_table();

CHAIRLIFT_INLINE void pack_store(float* p, Vec v, uint32_t mask) {
  const __m128i lanes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPackTable.lanes[mask]));
  _mm256_storeu_ps(p, _mm256_permutevar8x32_ps(v, _mm256_cvtepu8_epi32(lanes)));
}
// Transposes 4 x 4 words within each 128-bit part.
CHAIRLIFT_INLINE void interleave_quads(Words w[4]) {
  const Words a = _mm256_unpacklo_epi32(w[0], w[1]);
  const Words b = _mm256_unpacklo_epi32(w[2], w[3]);
  const Words c = _mm256_unpackhi_epi32(w[0], w[1]);
  const Words d = _mm256_unpackhi_epi32(w[2], w[3]);
  w[0] = _mm256_unpacklo_epi64(a, b);
  w[1] = _mm256_unpackhi_epi64(a, b);
  w[2] = _mm256_unpacklo_epi64(c, d);
  w[3] = _mm256_unpackhi_epi64(c, d);
}
CHAIRLIFT_INLINE Words quad_order() { return _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7); }

}  // namespace chairlift::CHAIRLIFT_SIMD_NS

#elif defined(CHAIRLIFT_SIMD_NEON)

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
CHAIRLIFT_INLINE uint32_t less_mask(Vec a, Vec b) {
  const uint32x4_t bits = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(vcltq_f32(a, b), bits));
}
CHAIRLIFT_INLINE void pack_store(float* p, Vec v, uint32_t mask) {
  float lanes[kLanes];
  store(lanes, v);
  int n = 0;
  for (int i = 0; i < kLanes; ++i) {
    p[n] = lanes[i];
    n += static_cast<int>((mask >> i) & 1u);
    if (n == kLanes) break;
  }
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
CHAIRLIFT_INLINE Words quad_order() {
  const uint32x4_t order = {0, 1, 2, 3};
  return order;
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS

#else

namespace chairlift::CHAIRLIFT_SIMD_NS {

struct Words {
  uint32_t v[kLanes];
};

#define CHAIRLIFT_EACH_WORD(expression)                 \
  Words r;                                              \
  for (int i = 0; i < kLanes; ++i) r.v[i] = expression; \
  return r

CHAIRLIFT_INLINE Words words(uint32_t x) { CHAIRLIFT_EACH_WORD(x); }
CHAIRLIFT_INLINE Words load_words(const void* p) {
  Words r;
  std::memcpy(r.v, p, sizeof(r.v));
  return r;
}
CHAIRLIFT_INLINE void store_words(void* p, Words a) { std::memcpy(p, a.v, sizeof(a.v)); }
CHAIRLIFT_INLINE Words load_words_partial(const void* p, int n) {
  Words r = words(0);
  std::memcpy(r.v, p, static_cast<size_t>(n) * sizeof(uint32_t));
  return r;
}
CHAIRLIFT_INLINE Words add(Words a, Words b) { CHAIRLIFT_EACH_WORD(a.v[i] + b.v[i]); }
CHAIRLIFT_INLINE Words sub(Words a, Words b) { CHAIRLIFT_EACH_WORD(a.v[i] - b.v[i]); }
CHAIRLIFT_INLINE Words mul(Words a, Words b) { CHAIRLIFT_EACH_WORD(a.v[i] * b.v[i]); }
CHAIRLIFT_INLINE Words xor_words(Words a, Words b) { CHAIRLIFT_EACH_WORD(a.v[i] ^ b.v[i]); }
template <int n>
CHAIRLIFT_INLINE Words shift_right(Words a) {
  CHAIRLIFT_EACH_WORD(a.v[i] >> n);
}
CHAIRLIFT_INLINE void mul_wide(Words a, Words b, Words* high, Words* low) {
  for (int i = 0; i < kLanes; ++i) {
    const uint64_t product = static_cast<uint64_t>(a.v[i]) * b.v[i];
    high->v[i] = static_cast<uint32_t>(product >> 32);
    low->v[i] = static_cast<uint32_t>(product);
  }
}
CHAIRLIFT_INLINE Vec to_float(Words a) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<float>(static_cast<int32_t>(a.v[i]));
  return r;
}
CHAIRLIFT_INLINE uint32_t less_mask(Vec a, Vec b) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(a.v[i] < b.v[i]) << i;
  return mask;
}
CHAIRLIFT_INLINE void pack_store(float* p, Vec v, uint32_t mask) {
  int n = 0;
  for (int i = 0; i < kLanes; ++i) {
    if ((mask >> i) & 1u) p[n++] = v.v[i];
  }
}
CHAIRLIFT_INLINE void interleave_quads(Words w[4]) {
  const Words in[4] = {w[0], w[1], w[2], w[3]};
  for (int i = 0; i < 4 * kLanes; ++i) w[i / kLanes].v[i % kLanes] = in[i % 4].v[i / 4];
}
CHAIRLIFT_INLINE Words quad_order() { CHAIRLIFT_EACH_WORD(static_cast<uint32_t>(i)); }
#undef CHAIRLIFT_EACH_WORD

}  // namespace chairlift::CHAIRLIFT_SIMD_NS

#endif
