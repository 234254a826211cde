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
  const uint8_t* scales[kTileTokens];         // of the keys; with kHasScales only, like the next two
  alignas(64) float key_scales[kTileTokens];  // 0 behind `count`
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
        tile->scales[j] = scales + offset * sizeof(float);
        __builtin_prefetch(tile->scales[j]);
        __builtin_prefetch(tile->scales[j] + call.value_bytes);
      }
    }
  }
  for (int j = tile->count; j < kTileTokens; ++j) tile->keys[j] = reinterpret_cast<const uint8_t*>(kZeroRow);
}

static void load_scales(const AttentionCall& call, TileTokens* tile) {
  for (int j = 0; j < kTileTokens; ++j) {
    const bool is_used = j < tile->count;
    tile->key_scales[j] = is_used ? read_float(tile->scales[j]) : 0.0f;
    tile->value_scales[j] = is_used ? read_float(tile->scales[j] + call.value_bytes) : 0.0f;
  }
}

// What to prefetch during a tile; null: nothing.
struct TilesAhead {
  const TileTokens* next;       // of the same task
  const TileTokens* following;  // the following task's first
};

constexpr int kShortTile = kTileTokens / 2;

// Asks the memory for later tiles while this one is worked on: blocks are scattered, so the hardware cannot guess. The
// rows are spread over the steps of a loop, because a core has few requests under way and a burst would stall it.
struct TilePrefetch {
  TilesAhead ahead;
  int64_t offset_bytes;  // 0 for K, value_bytes for V
  int64_t token_bytes;
  int num_steps;
  CHAIRLIFT_INLINE_MEMBER void operator()(int step) const {
    if (ahead.next != nullptr) fetch(*ahead.next, step);
    if (ahead.following != nullptr) fetch(*ahead.following, step);
  }

 private:
  CHAIRLIFT_INLINE_MEMBER void fetch(const TileTokens& tile, int step) const {
    for (int j = step; j < tile.count; j += num_steps) {
      const uint8_t* row = tile.keys[j] + offset_bytes;
      // Into the second-level cache: into the first, the core would have to hold each request itself, half as fast.
      for (int64_t i = 0; i < token_bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
    }
  }
};

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

#include "attention_transpose.inl"

// Stores columns: keys[channel * kTileTokens + token].
struct StoreColumns {
  float* keys;
  CHAIRLIFT_INLINE_MEMBER void operator()(int channel, Vec column) const {
    store(keys + channel * kTileTokens, column);
  }
};

// K of the tile as floats, transposed: keys[channel * kTileTokens + token], for num_vecs * kLanes tokens.
template <class Kv>
static void load_keys(const AttentionCall& call, const TileTokens& tile, int num_vecs, float* keys) {
  for (int j = 0; j < num_vecs * kLanes; j += kLanes) {
    StoreColumns take{keys + j};
    for_each_column<Kv>(tile.keys + j, call.head_dim, take);
  }
}

// Multiplies columns with queries as they come: the same chains of sums that multiply() would make of them.
template <int kRows>
struct ScoreColumns {
  const float* const* queries;
  Vec sums[kRows];
  CHAIRLIFT_INLINE_MEMBER void operator()(int channel, Vec column) {
    for (int r = 0; r < kRows; ++r) sums[r] = fma(set1(queries[r][channel]), column, sums[r]);
  }
};

// scores[row * kTileTokens + token] of kRows queries: the keys are used once, so they are not stored on the way.
template <class Kv, int kRows>
[[gnu::noinline]] static void score_rows(const AttentionCall& call, const TileTokens& tile, const float* const* queries,
                                         const TilePrefetch& prefetch, int num_vecs, float* scores) {
  for (int j = 0; j < num_vecs * kLanes; j += kLanes) {
    for (int i = 0; i < kLanes; ++i) prefetch(j + i);
    ScoreColumns<kRows> take{queries, {}};
    for (int r = 0; r < kRows; ++r) take.sums[r] = zero();
    for_each_column<Kv>(tile.keys + j, call.head_dim, take);
    for (int r = 0; r < kRows; ++r) store(scores + r * kTileTokens + j, take.sums[r]);
  }
}

// The same for a number of rows that is known when it runs, 1 to kRows.
template <class Kv, int kRows>
CHAIRLIFT_INLINE void score_few(int num_rows, const AttentionCall& call, const TileTokens& tile,
                                const float* const* queries, const TilePrefetch& prefetch, int num_vecs,
                                float* scores) {
  if constexpr (kRows > 0) {
    if (num_rows == kRows) {
      score_rows<Kv, kRows>(call, tile, queries, prefetch, num_vecs, scores);
    } else {
      score_few<Kv, kRows - 1>(num_rows, call, tile, queries, prefetch, num_vecs, scores);
    }
  }
}

// V of the tile's tokens as floats: values[token * padded_dim + d]; zeros behind head_dim.
template <class Kv>
static void load_values(const AttentionCall& call, const TileTokens& tile, float* values) {
  using Element = typename Kv::Element;
  for (int j = 0; j < tile.count; ++j) {
    const Element* row = reinterpret_cast<const Element*>(tile.keys[j] + call.value_bytes);
    float* out = values + j * call.padded_dim;
    for (int d = 0; d < call.padded_dim; d += kLanes) {
      const int count = call.head_dim - d;
      store(out + d, count > 0 ? load_some<Kv>(row + d, count) : zero());
    }
  }
}

// V where it lies, converted as it is read: for units of few rows, which read each element once anyway.
template <class Kv>
struct ValueRows {
  using Element = typename Kv::Element;
  const TileTokens& tile;
  int64_t value_bytes;
  TilePrefetch prefetch;
  CHAIRLIFT_INLINE_MEMBER const Element* row(int k) const {
    return reinterpret_cast<const Element*>(tile.keys[k] + value_bytes);
  }
  CHAIRLIFT_INLINE Vec load_vec(const Element* p) { return Kv::load_vec(p); }
};
