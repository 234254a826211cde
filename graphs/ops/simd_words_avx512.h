// AVX-512: 16 words. See simd_words.h.
#pragma once

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
CHAIRLIFT_INLINE Words round_words(Vec a) { return _mm512_cvtps_epi32(a); }
CHAIRLIFT_INLINE uint32_t less_mask(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
CHAIRLIFT_INLINE void pack_store(float* p, Vec v, uint32_t mask) {
  _mm512_storeu_ps(p, _mm512_maskz_compress_ps(static_cast<__mmask16>(mask), v));
}
CHAIRLIFT_INLINE void pack_store(uint32_t* p, Words v, uint32_t mask) {
  store_words(p, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), v));
}
CHAIRLIFT_INLINE Words lane_numbers() {
  return _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
}
CHAIRLIFT_INLINE Vec keep_lanes(Vec v, int n) { return _mm512_maskz_mov_ps(first_lanes(n), v); }
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
// Packing yields four bytes of each vector in turn, within each 128-bit part.
CHAIRLIFT_INLINE void store_bytes(uint8_t* p, const Words (&w)[4]) {
  const Words bytes = _mm512_packus_epi16(_mm512_packs_epi32(w[0], w[1]), _mm512_packs_epi32(w[2], w[3]));
  store_words(p, _mm512_permutexvar_epi32(quad_order(), bytes));
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
