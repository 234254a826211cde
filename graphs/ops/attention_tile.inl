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

constexpr int kTileGroups = kTileTokens / kKeyGroup;

// Where the tile's tokens lie. What lies beyond the context may never have been written (it could be NaN): V is not
// read there, and what K yields there are scores that get masked.
struct TileTokens {
  int64_t start;     // position of the first token, a multiple of kTileTokens
  int count;         // tokens of the unit's range
  int num_groups;    // that hold them; 0: blocks do not consist of whole groups, tokens are looked up one by one
  const uint8_t* groups[kTileGroups];         // K of the groups; behind num_groups the first's once more
  const uint8_t* scales[kTileGroups];         // of the keys; with kHasScales only, like the next two
  alignas(64) float key_scales[kTileTokens];
  alignas(64) float value_scales[kTileTokens];
};

// A token's place in its block: where the block's K of a head begins, and which of its tokens it is.
struct TokenPlace {
  const uint8_t* head;
  int64_t offset;
};

CHAIRLIFT_INLINE TokenPlace place_of(const AttentionCall& call, const AttentionUnit& unit, int64_t position) {
  const int32_t block = call.block_table[unit.sequence * call.max_blocks + position / call.block_size];
  return {call.kv_cache + block * call.block_bytes + unit.kv_head * call.head_bytes, position % call.block_size};
}

CHAIRLIFT_INLINE const uint8_t* scale_at(const AttentionCall& call, const TokenPlace& place) {
  return place.head + call.block_size * call.token_bytes + place.offset * sizeof(float);
}

template <class Kv>
static void locate_tile(const AttentionCall& call, const AttentionUnit& unit, int64_t start, TileTokens* tile) {
  const int64_t left = unit.kv_end - start;
  tile->start = start;
  tile->count = static_cast<int>(left < kTileTokens ? left : kTileTokens);
  tile->num_groups = call.key_group == kKeyGroup ? (tile->count + kKeyGroup - 1) / kKeyGroup : 0;
  for (int g = 0; g < tile->num_groups; ++g) {
    const TokenPlace place = place_of(call, unit, start + g * kKeyGroup);
    tile->groups[g] = place.head + place.offset * call.token_bytes;
    if constexpr (Kv::kHasScales) {
      tile->scales[g] = scale_at(call, place);
      __builtin_prefetch(tile->scales[g]);
      __builtin_prefetch(tile->scales[g] + call.value_bytes);
    }
  }
  for (int g = tile->num_groups; g > 0 && g < kTileGroups; ++g) tile->groups[g] = tile->groups[0];
}

static void load_scales(const AttentionCall& call, const AttentionUnit& unit, TileTokens* tile) {
  for (int g = 0; g < tile->num_groups; ++g) {
    std::memcpy(tile->key_scales + g * kKeyGroup, tile->scales[g], kKeyGroup * sizeof(float));
    std::memcpy(tile->value_scales + g * kKeyGroup, tile->scales[g] + call.value_bytes, kKeyGroup * sizeof(float));
  }
  if (tile->num_groups > 0) return;
  TokenPlace place{};
  for (int j = 0; j < tile->count; ++j, ++place.offset) {
    if (j == 0 || place.offset == call.block_size) place = place_of(call, unit, tile->start + j);
    const uint8_t* scale = scale_at(call, place);
    std::memcpy(tile->key_scales + j, scale, sizeof(float));
    std::memcpy(tile->value_scales + j, scale + call.value_bytes, sizeof(float));
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

  // Rows row to row + kSteps - 1, a multiple of kSteps; behind a tile's last: none.
  CHAIRLIFT_INLINE_MEMBER void operator()(int row) const {
    if (ahead.next != nullptr) fetch(*ahead.next, row);
    if (ahead.following != nullptr) fetch(*ahead.following, row);
  }

  CHAIRLIFT_INLINE_MEMBER void all_from(int row) const {
    for (; row < kTileTokens; row += kSteps) (*this)(row);
  }

 private:
  // A group's K lies all over its run, whichever of its tokens there are.
  CHAIRLIFT_INLINE_MEMBER void fetch(const TileTokens& tile, int row) const {
    const int num_rows = offset_bytes == 0 ? tile.num_groups * kKeyGroup : tile.count;
    if (row >= num_rows || tile.num_groups == 0) return;
    const uint8_t* first = tile.groups[row / kKeyGroup] + row % kKeyGroup * token_bytes + offset_bytes;
    // Into the second-level cache: into the first, the core would have to hold each request itself, half as fast.
    for (int64_t i = 0; i < kSteps * token_bytes; i += 64) __builtin_prefetch(first + i, 0, 2);
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

// K where it lies, a row for each channel, converted as it is read. Needs groups.
template <class Kv>
struct KeyChannels {
  using Element = typename Kv::Element;
  template <int kVecs>
  struct Steps {
    const Element* first[kVecs];
    CHAIRLIFT_INLINE_MEMBER Vec load_vec(int step, int column) const {
      return Kv::load_vec(first[column / kLanes] + step * kKeyGroup);
    }
  };
  const TileTokens& tile;
  TilePrefetch ahead;
  template <int kVecs>
  CHAIRLIFT_INLINE_MEMBER Steps<kVecs> steps(int channel, int token) const {
    Steps<kVecs> result;
    for (int v = 0; v < kVecs; ++v, token += kLanes) {
      const Element* group = reinterpret_cast<const Element*>(tile.groups[token / kKeyGroup]);
      result.first[v] = group + channel * kKeyGroup + token % kKeyGroup;
    }
    return result;
  }
  CHAIRLIFT_INLINE_MEMBER void prefetch(int channel) const { ahead(channel); }
  CHAIRLIFT_INLINE_MEMBER void prefetch_rest(int channel) const { ahead.all_from(channel); }
};

// V where it lies, likewise a row for each token.
template <class Kv>
struct ValueTokens {
  using Element = typename Kv::Element;
  struct Steps {
    const uint8_t* first;
    int64_t token_bytes;
    CHAIRLIFT_INLINE_MEMBER Vec load_vec(int step, int column) const {
      return Kv::load_vec(reinterpret_cast<const Element*>(first + step * token_bytes) + column);
    }
  };
  const TileTokens& tile;
  int64_t value_bytes;
  TilePrefetch ahead;
  template <int kVecs>
  CHAIRLIFT_INLINE_MEMBER Steps steps(int token, int d) const {
    const uint8_t* first = tile.groups[token / kKeyGroup] + value_bytes + token % kKeyGroup * ahead.token_bytes;
    return {first + d * sizeof(Element), ahead.token_bytes};
  }
  CHAIRLIFT_INLINE_MEMBER void prefetch(int token) const { ahead(token); }
  CHAIRLIFT_INLINE_MEMBER void prefetch_rest(int token) const { ahead.all_from(token); }
};

// K of the tile as floats: keys[channel * kTileTokens + token]. Tokens behind the last may be anything.
template <class Kv>
static void load_grouped_keys(const AttentionCall& call, const TileTokens& tile, float* keys) {
  using Element = typename Kv::Element;
  for (int channel = 0; channel < call.head_dim; ++channel) {
    for (int j = 0; j < tile.num_groups * kKeyGroup; j += kLanes) {
      const Element* group = reinterpret_cast<const Element*>(tile.groups[j / kKeyGroup]);
      store(keys + channel * kTileTokens + j, Kv::load_vec(group + channel * kKeyGroup + j % kKeyGroup));
    }
  }
}

// Of blocks of kTokens, which divides a tile: a block is converted as it lies, then spread over the channels' rows.
template <class Kv, int kTokens>
static void load_small_blocks(const AttentionCall& call, const AttentionUnit& unit, const TileTokens& tile,
                              float* keys) {
  using Element = typename Kv::Element;
  alignas(64) float floats[kMaxHeadDim * kTokens + kLanes];
  const int num_elements = call.head_dim * kTokens;
  for (int j = 0; j < tile.count; j += kTokens) {
    const Element* block = reinterpret_cast<const Element*>(place_of(call, unit, tile.start + j).head);
    for (int i = 0; i < num_elements; i += kLanes) store(floats + i, load_some<Kv>(block + i, num_elements - i));
    for (int channel = 0; channel < call.head_dim; ++channel) {
      std::memcpy(keys + channel * kTileTokens + j, floats + channel * kTokens, kTokens * sizeof(float));
    }
  }
}

// Of blocks of any other size.
template <class Kv>
static void load_single_keys(const AttentionCall& call, const AttentionUnit& unit, const TileTokens& tile,
                             float* keys) {
  using Element = typename Kv::Element;
  alignas(64) Element row[kMaxHeadDim] = {};
  alignas(64) float floats[kMaxHeadDim];
  for (int j = 0; j < tile.count; ++j) {
    const TokenPlace place = place_of(call, unit, tile.start + j);
    const Element* first = reinterpret_cast<const Element*>(place.head) + place.offset;
    for (int channel = 0; channel < call.head_dim; ++channel) row[channel] = first[channel * call.key_group];
    for (int channel = 0; channel < call.head_dim; channel += kLanes) {
      store(floats + channel, Kv::load_vec(row + channel));
    }
    for (int channel = 0; channel < call.head_dim; ++channel) keys[channel * kTileTokens + j] = floats[channel];
  }
}

template <class Kv>
static void load_keys(const AttentionCall& call, const AttentionUnit& unit, const TileTokens& tile, float* keys) {
  switch (call.key_group) {
    case kKeyGroup: return load_grouped_keys<Kv>(call, tile, keys);
    case 8: return load_small_blocks<Kv, 8>(call, unit, tile, keys);
    case 4: return load_small_blocks<Kv, 4>(call, unit, tile, keys);
    case 2: return load_small_blocks<Kv, 2>(call, unit, tile, keys);
    case 1: return load_small_blocks<Kv, 1>(call, unit, tile, keys);
    default: return load_single_keys<Kv>(call, unit, tile, keys);
  }
}

// V of the tile's tokens as floats: values[token * padded_dim + d]; zeros behind head_dim.
template <class Kv>
static void load_values(const AttentionCall& call, const AttentionUnit& unit, const TileTokens& tile, float* values) {
  using Element = typename Kv::Element;
  TokenPlace place{};
  for (int j = 0; j < tile.count; ++j, ++place.offset) {
    if (tile.num_groups > 0) {
      place = {tile.groups[j / kKeyGroup], j % kKeyGroup};
    } else if (j == 0 || place.offset == call.block_size) {
      place = place_of(call, unit, tile.start + j);
    }
    const uint8_t* bytes = place.head + place.offset * call.token_bytes + call.value_bytes;
    const Element* row = reinterpret_cast<const Element*>(bytes);
    float* out = values + j * call.padded_dim;
    for (int d = 0; d < call.padded_dim; d += kLanes) {
      const int count = call.head_dim - d;
      store(out + d, count > 0 ? load_some<Kv>(row + d, count) : zero());
    }
  }
}
