// Keys become columns. Transposing 16-bit and 8-bit elements before they are converted takes half and a quarter of the
// shuffles that floats would. Included by attention_tile.inl, inside its namespace.

// Reads kLanes rows from channel `channel` on and gives column after column, as floats, to `take(channel, column)`, in
// the order of the channels: min(count, kLanes) of them.
template <class Kv, class Take>
CHAIRLIFT_INLINE void transpose_floats(const uint8_t* const* rows, int channel, int count, Take& take) {
  using Element = typename Kv::Element;
  Vec block[kLanes];
  for (int i = 0; i < kLanes; ++i) block[i] = load_some<Kv>(reinterpret_cast<const Element*>(rows[i]) + channel, count);
  transpose(block);
  for (int i = 0; i < kLanes && i < count; ++i) take(channel + i, block[i]);
}

// The same for kChannels whole channels of a type that has a faster way here; kChannels = 0: it has none.
template <class Kv>
struct FastTranspose {
  static constexpr int kChannels = 0;
  template <class Take>
  static void run(const uint8_t* const*, int, Take&) {}
};

#if defined(CHAIRLIFT_SIMD_AVX512)

template <>
struct FastTranspose<KvFloat16> {
  static constexpr int kChannels = 32;
  template <class Take>
  CHAIRLIFT_INLINE void run(const uint8_t* const* rows, int channel, Take& take) {
    __m512i a[16];
    __m512i b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + channel * 2);
    for (int i = 0; i < 16; i += 2) {  // 2 tokens side by side
      b[i] = _mm512_unpacklo_epi16(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi16(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // 4 tokens
      a[i] = _mm512_unpacklo_epi32(b[i], b[i + 2]);
      a[i + 1] = _mm512_unpackhi_epi32(b[i], b[i + 2]);
      a[i + 2] = _mm512_unpacklo_epi32(b[i + 1], b[i + 3]);
      a[i + 3] = _mm512_unpackhi_epi32(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 16; i += 8) {  // 8 tokens: b[d] holds channels d, 8 + d, 16 + d, 24 + d
      for (int p = 0; p < 4; ++p) {
        b[i + 2 * p] = _mm512_unpacklo_epi64(a[i + p], a[i + 4 + p]);
        b[i + 2 * p + 1] = _mm512_unpackhi_epi64(a[i + p], a[i + 4 + p]);
      }
    }
    const __m512i low = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i high = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    __m512i half[8];
    for (int d = 0; d < 8; ++d) half[d] = _mm512_permutex2var_epi64(b[d], low, b[8 + d]);
    for (int d = 0; d < 8; ++d) take(channel + d, _mm512_cvtph_ps(_mm512_castsi512_si256(half[d])));
    for (int d = 0; d < 8; ++d) take(channel + 8 + d, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half[d], 1)));
    for (int d = 0; d < 8; ++d) half[d] = _mm512_permutex2var_epi64(b[d], high, b[8 + d]);
    for (int d = 0; d < 8; ++d) take(channel + 16 + d, _mm512_cvtph_ps(_mm512_castsi512_si256(half[d])));
    for (int d = 0; d < 8; ++d) take(channel + 24 + d, _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half[d], 1)));
  }
};

template <>
struct FastTranspose<KvInt8> {
  static constexpr int kChannels = 64;
  CHAIRLIFT_INLINE Vec widen(__m128i bytes) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bytes)); }
  template <class Take>
  CHAIRLIFT_INLINE void run(const uint8_t* const* rows, int channel, Take& take) {
    __m512i a[16];
    __m512i b[16];
    for (int i = 0; i < 16; ++i) a[i] = _mm512_loadu_si512(rows[i] + channel);
    for (int i = 0; i < 16; i += 2) {  // 2 tokens side by side
      b[i] = _mm512_unpacklo_epi8(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_epi8(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {  // 4 tokens
      for (int p = 0; p < 2; ++p) {
        a[i + 2 * p] = _mm512_unpacklo_epi16(b[i + p], b[i + 2 + p]);
        a[i + 2 * p + 1] = _mm512_unpackhi_epi16(b[i + p], b[i + 2 + p]);
      }
    }
    for (int i = 0; i < 16; i += 8) {  // 8 tokens
      for (int p = 0; p < 4; ++p) {
        b[i + 2 * p] = _mm512_unpacklo_epi32(a[i + p], a[i + 4 + p]);
        b[i + 2 * p + 1] = _mm512_unpackhi_epi32(a[i + p], a[i + 4 + p]);
      }
    }
    for (int p = 0; p < 8; ++p) {  // 16 tokens: a[d] holds channels d, 16 + d, 32 + d, 48 + d
      a[2 * p] = _mm512_unpacklo_epi64(b[p], b[8 + p]);
      a[2 * p + 1] = _mm512_unpackhi_epi64(b[p], b[8 + p]);
    }
    for (int d = 0; d < 16; ++d) take(channel + d, widen(_mm512_castsi512_si128(a[d])));
    for (int d = 0; d < 16; ++d) take(channel + 16 + d, widen(_mm512_extracti32x4_epi32(a[d], 1)));
    for (int d = 0; d < 16; ++d) take(channel + 32 + d, widen(_mm512_extracti32x4_epi32(a[d], 2)));
    for (int d = 0; d < 16; ++d) take(channel + 48 + d, widen(_mm512_extracti32x4_epi32(a[d], 3)));
  }
};

#elif defined(CHAIRLIFT_SIMD_AVX2)

template <>
struct FastTranspose<KvFloat16> {
  static constexpr int kChannels = 16;
  template <class Take>
  CHAIRLIFT_INLINE void run(const uint8_t* const* rows, int channel, Take& take) {
    __m256i a[8];
    __m256i b[8];
    for (int i = 0; i < 8; ++i) a[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(rows[i] + channel * 2));
    for (int i = 0; i < 8; i += 2) {  // 2 tokens side by side
      b[i] = _mm256_unpacklo_epi16(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_epi16(a[i], a[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {  // 4 tokens
      a[i] = _mm256_unpacklo_epi32(b[i], b[i + 2]);
      a[i + 1] = _mm256_unpackhi_epi32(b[i], b[i + 2]);
      a[i + 2] = _mm256_unpacklo_epi32(b[i + 1], b[i + 3]);
      a[i + 3] = _mm256_unpackhi_epi32(b[i + 1], b[i + 3]);
    }
    for (int p = 0; p < 4; ++p) {  // 8 tokens: b[d] holds channels d and 8 + d
      b[2 * p] = _mm256_unpacklo_epi64(a[p], a[4 + p]);
      b[2 * p + 1] = _mm256_unpackhi_epi64(a[p], a[4 + p]);
    }
    for (int d = 0; d < 8; ++d) take(channel + d, _mm256_cvtph_ps(_mm256_castsi256_si128(b[d])));
    for (int d = 0; d < 8; ++d) take(channel + 8 + d, _mm256_cvtph_ps(_mm256_extracti128_si256(b[d], 1)));
  }
};

#endif

// All channels of kLanes tokens' keys, column after column.
template <class Kv, class Take>
CHAIRLIFT_INLINE void for_each_column(const uint8_t* const* rows, int head_dim, Take& take) {
  constexpr int kFast = FastTranspose<Kv>::kChannels;
  int channel = 0;
  for (; kFast > 0 && channel + kFast <= head_dim; channel += kFast) FastTranspose<Kv>::run(rows, channel, take);
  for (; channel < head_dim; channel += kLanes) transpose_floats<Kv>(rows, channel, head_dim - channel, take);
}
