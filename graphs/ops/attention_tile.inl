// Reading one tile of K and V through the block table. Included by paged_attention.inl, inside its namespace.

// How the KV buffer's elements are read: one struct per type.
struct KvFloat32 {
  using Element = float;
  static constexpr bool kHasScales = false;
  CHAIRLIFT_INLINE Vec load_vec(const Element* p) { return load(p); }
};
struct KvFloat16 {
  using Element = uint16_t;
  static constexpr bool kHasScales = false;
  CHAIRLIFT_INLINE Vec load_vec(const Element* p) { return load_f16(p); }
};
struct KvInt8 {
  using Element = int8_t;
  static constexpr bool kHasScales = true;
  CHAIRLIFT_INLINE Vec load_vec(const Element* p) { return load_i8(p); }
};

// What lies beyond the context may never have been written (it could be NaN): it is read as this row.
alignas(64) static const float kZeroRow[kMaxHeadDim] = {};

// Where the tile's tokens lie. The V of a token is value_bytes behind its K.
struct TileTokens {
  int64_t start;  // position of the first token, a multiple of kTileTokens
  int count;      // tokens of the unit's range: the rest of the tile is not to be read
  const uint8_t* keys[kTileTokens];
  alignas(64) float key_scales[kTileTokens];  // with kHasScales only; 0 behind `count`
  alignas(64) float value_scales[kTileTokens];
};

CHAIRLIFT_INLINE float read_float(const uint8_t* p) {
  float value;
  std::memcpy(&value, p, sizeof(value));
  return value;
}

template <class Kv>
static void locate_tile(const AttentionCall& call, const AttentionUnit& unit, int64_t start, TileTokens* tile) {
  const int64_t left = unit.kv_end - start;
  tile->start = start;
  tile->count = static_cast<int>(left < kTileTokens ? left : kTileTokens);
  const int32_t* table = call.block_table + unit.sequence * call.max_blocks;
  int64_t column = start / call.block_size;
  int64_t offset = start % call.block_size;
  for (int j = 0; j < tile->count; ++column, offset = 0) {
    const uint8_t* head = call.kv_cache + table[column] * call.block_bytes + unit.kv_head * call.head_bytes;
    const uint8_t* scales = head + call.block_size * call.token_bytes;
    for (; offset < call.block_size && j < tile->count; ++offset, ++j) {
      tile->keys[j] = head + offset * call.token_bytes;
      if constexpr (Kv::kHasScales) {
        tile->key_scales[j] = read_float(scales + offset * sizeof(float));
        tile->value_scales[j] = read_float(scales + offset * sizeof(float) + call.value_bytes);
      }
    }
  }
  for (int j = tile->count; j < kTileTokens; ++j) {
    tile->keys[j] = reinterpret_cast<const uint8_t*>(kZeroRow);
    tile->key_scales[j] = 0.0f;
    tile->value_scales[j] = 0.0f;
  }
}

// Asks the memory for a later tile while this one is worked on: blocks are scattered, so the hardware cannot guess.
CHAIRLIFT_INLINE void prefetch_row(const uint8_t* row, int64_t num_bytes) {
  for (int64_t i = 0; i < num_bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

// The last elements of a row whose length is no multiple of kLanes; zeros behind them.
template <class Kv>
CHAIRLIFT_INLINE Vec load_tail(const typename Kv::Element* p, int count) {
  typename Kv::Element lanes[kLanes] = {};
  std::memcpy(lanes, p, static_cast<size_t>(count) * sizeof(lanes[0]));
  return Kv::load_vec(lanes);
}

template <class Kv>
CHAIRLIFT_INLINE Vec load_some(const typename Kv::Element* p, int count) {
  return count >= kLanes ? Kv::load_vec(p) : load_tail<Kv>(p, count);
}

// K of the tile as floats, transposed: keys[d * kTileTokens + token], for num_vecs * kLanes tokens.
template <class Kv>
static void load_keys(const AttentionCall& call, const TileTokens& tile, const TileTokens* next, int num_vecs, float* keys) {
  using Element = typename Kv::Element;
  for (int j = 0; j < num_vecs * kLanes; j += kLanes) {
    if (next != nullptr) {
      for (int i = 0; i < kLanes; ++i) prefetch_row(next->keys[j + i], call.token_bytes);
    }
    for (int d = 0; d < call.head_dim; d += kLanes) {
      const int count = call.head_dim - d;
      Vec block[kLanes];
      for (int i = 0; i < kLanes; ++i) block[i] = load_some<Kv>(reinterpret_cast<const Element*>(tile.keys[j + i]) + d, count);
      transpose(block);
      for (int i = 0; i < kLanes && i < count; ++i) store(keys + (d + i) * kTileTokens + j, block[i]);
    }
  }
}

// V of the tile's tokens as floats: values[token * padded_dim + d]; zeros behind head_dim.
template <class Kv>
static void load_values(const AttentionCall& call, const TileTokens& tile, const TileTokens* next, float* values) {
  using Element = typename Kv::Element;
  for (int j = 0; j < tile.count; ++j) {
    if (next != nullptr) prefetch_row(next->keys[j] + call.value_bytes, call.token_bytes);
    const Element* row = reinterpret_cast<const Element*>(tile.keys[j] + call.value_bytes);
    float* out = values + j * call.padded_dim;
    for (int d = 0; d < call.padded_dim; d += kLanes) {
      const int count = call.head_dim - d;
      store(out + d, count > 0 ? load_some<Kv>(row + d, count) : zero());
    }
  }
}
