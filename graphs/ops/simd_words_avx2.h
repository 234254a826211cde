// AVX2: 8 words. See simd_words.h.
#pragma once

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
CHAIRLIFT_INLINE Words round_words(Vec a) { return _mm256_cvtps_epi32(a); }
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

CHAIRLIFT_INLINE void pack_store(uint32_t* p, Words v, uint32_t mask) {
  const __m128i lanes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(kPackTable.lanes[mask]));
  store_words(p, _mm256_permutevar8x32_epi32(v, _mm256_cvtepu8_epi32(lanes)));
}
CHAIRLIFT_INLINE void pack_store(float* p, Vec v, uint32_t mask) {
  pack_store(reinterpret_cast<uint32_t*>(p), _mm256_castps_si256(v), mask);
}
CHAIRLIFT_INLINE Words lane_numbers() { return _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7); }
CHAIRLIFT_INLINE Vec keep_lanes(Vec v, int n) { return _mm256_and_ps(v, _mm256_castsi256_ps(first_lanes(n))); }
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
// Packing yields four bytes of each vector in turn, within each 128-bit part.
CHAIRLIFT_INLINE void store_bytes(uint8_t* p, const Words (&w)[4]) {
  const Words bytes = _mm256_packus_epi16(_mm256_packs_epi32(w[0], w[1]), _mm256_packs_epi32(w[2], w[3]));
  store_words(p, _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
