// Plain C++: 8 words in an array. See simd_words.h.
#pragma once

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
CHAIRLIFT_INLINE Words round_words(Vec a) {
  const Vec rounded = round(a);
  Words r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = static_cast<uint32_t>(static_cast<int32_t>(rounded.v[i]));
  return r;
}
CHAIRLIFT_INLINE uint32_t less_mask(Vec a, Vec b) {
  uint32_t mask = 0;
  for (int i = 0; i < kLanes; ++i) mask |= static_cast<uint32_t>(a.v[i] < b.v[i]) << i;
  return mask;
}
template <class T, class Lanes>
CHAIRLIFT_INLINE void pack_store(T* p, const Lanes& a, uint32_t mask) {
  int n = 0;
  for (int i = 0; i < kLanes; ++i) {
    if ((mask >> i) & 1u) p[n++] = a.v[i];
  }
}
CHAIRLIFT_INLINE Words lane_numbers() { CHAIRLIFT_EACH_WORD(static_cast<uint32_t>(i)); }
CHAIRLIFT_INLINE Vec keep_lanes(Vec v, int n) {
  for (int i = n; i < kLanes; ++i) v.v[i] = 0.0f;
  return v;
}
CHAIRLIFT_INLINE void interleave_quads(Words w[4]) {
  const Words in[4] = {w[0], w[1], w[2], w[3]};
  for (int i = 0; i < 4 * kLanes; ++i) w[i / kLanes].v[i % kLanes] = in[i % 4].v[i / 4];
}
CHAIRLIFT_INLINE Words quad_order() { return lane_numbers(); }
CHAIRLIFT_INLINE void store_bytes(uint8_t* p, const Words (&w)[4]) {
  for (int i = 0; i < 4 * kLanes; ++i) {
    const int32_t word = static_cast<int32_t>(w[i / kLanes].v[i % kLanes]);
    p[i] = static_cast<uint8_t>(word < 0 ? 0 : word > 255 ? 255 : word);
  }
}
#undef CHAIRLIFT_EACH_WORD

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
