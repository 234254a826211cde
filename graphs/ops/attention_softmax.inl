// Online softmax over tiles and splits. Included by paged_attention.inl, inside its namespace.
//
// Scores are exponents of two (log2(e) is part of the queries' scale). A row's state is its largest score m, the sum l
// of 2^(score - m), and o, the sum of 2^(score - m) * V. Masked scores are so low that their power is exactly 0, and
// adding 0 changes nothing: a row is the same whatever other rows, and so whatever tiles, its unit has.

constexpr float kMasked = -1e30f;
constexpr float kLowestMax = -1e29f;  // stands in for m while a row has seen masked scores only

// 2^x for x <= 127; 0 below -126.5. Polynomial of degree 6 from Cephes' exp2f; 2^0 is exactly 1.
CHAIRLIFT_INLINE Vec exp2(Vec x) {
  const Vec n = round(x);
  const Vec r = sub(x, n);
  Vec p = set1(1.535336188319500e-4f);
  p = fma(p, r, set1(1.339887440266574e-3f));
  p = fma(p, r, set1(9.618437357674640e-3f));
  p = fma(p, r, set1(5.550332471162809e-2f));
  p = fma(p, r, set1(2.402264791363012e-1f));
  p = fma(p, r, set1(6.931472028550421e-1f));
  return scale_by_power(fma(p, r, set1(1.0f)), n);
}

// The rows of a unit: where their queries lie and which token positions they see.
struct UnitRows {
  int count;
  const float* queries[kMaxTileRows];
  float* outs[kMaxTileRows];
  int64_t begin[kMaxTileRows];
  int64_t end[kMaxTileRows];
};

struct RowStates {
  alignas(64) float m[kMaxTileRows];
  alignas(64) float l[kMaxTileRows];
  alignas(64) float l_lanes[kMaxTileRows * kLanes];  // l before its lanes are added up, at the end of a split
  alignas(64) float o[kMaxTileFloats];               // [row, padded_dim]
};

CHAIRLIFT_INLINE void reset(const AttentionCall& call, int num_rows, RowStates* states) {
  for (int r = 0; r < kMaxTileRows; ++r) states->m[r] = kMasked;
  std::memset(states->l_lanes, 0, sizeof(float) * static_cast<size_t>(num_rows * kLanes));
  std::memset(states->o, 0, sizeof(float) * static_cast<size_t>(num_rows * call.padded_dim));
}

// cap * tanh(score / cap) with scores as exponents of two; tanh(x) = 1 - 2 / (1 + e^2x).
CHAIRLIFT_INLINE Vec cap_scores(Vec score, float softcap) {
  const Vec power = exp2(min(mul(score, set1(2.0f / softcap)), set1(126.0f)));
  const Vec tanh = sub(set1(1.0f), div(set1(2.0f), add(set1(1.0f), power)));
  return mul(tanh, set1(softcap * 1.44269504088896341f));
}

alignas(64) static const float kLaneNumbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

CHAIRLIFT_INLINE float clamp_to_tile(int64_t offset) {
  return static_cast<float>(offset < 0 ? 0 : offset > kTileTokens ? kTileTokens : offset);
}

// Scales, caps and masks one row's scores in place; yields their maximum.
template <class Kv>
CHAIRLIFT_INLINE float finish_scores(const AttentionCall& call, const UnitRows& rows, int row, const TileTokens& tile,
                                     int num_vecs, float* scores) {
  const Vec begin = set1(clamp_to_tile(rows.begin[row] - tile.start));
  const Vec end = set1(clamp_to_tile(rows.end[row] - tile.start));
  const bool is_masked = rows.begin[row] > tile.start || rows.end[row] < tile.start + num_vecs * kLanes;
  const bool is_changed = Kv::kHasScales || call.softcap > 0.0f || is_masked;
  Vec largest = set1(kMasked);
  for (int j = 0; j < num_vecs * kLanes; j += kLanes) {
    Vec s = load(scores + j);
    if (is_changed) {
      if constexpr (Kv::kHasScales) s = mul(s, load(tile.key_scales + j));
      if (call.softcap > 0.0f) s = cap_scores(s, call.softcap);
      if (is_masked) {
        const Vec token = add(load(kLaneNumbers), set1(static_cast<float>(j)));
        s = select_less(token, end, s, set1(kMasked));
        s = select_less(token, begin, set1(kMasked), s);
      }
      store(scores + j, s);
    }
    largest = max(largest, s);
  }
  return reduce_max(largest);
}

// Turns scores [num_rows, kTileTokens] into weights of V, in place, and brings m and l up to date. alpha[row] is what
// the row's o must be multiplied by.
template <class Kv>
static void softmax_tile(const AttentionCall& call, const UnitRows& rows, const TileTokens& tile, int num_vecs,
                         float* scores, RowStates* states, float* alpha) {
  alignas(64) float m_tile[kMaxTileRows] = {};
  for (int r = 0; r < rows.count; ++r) {
    m_tile[r] = finish_scores<Kv>(call, rows, r, tile, num_vecs, scores + r * kTileTokens);
  }
  for (int r = 0; r < rows.count; r += kLanes) {
    const Vec m = load(states->m + r);
    const Vec m_new = max(m, load(m_tile + r));
    const Vec m_used = max(m_new, set1(kLowestMax));
    store(alpha + r, exp2(sub(m, m_used)));
    store(states->m + r, m_new);
    store(m_tile + r, m_used);
  }
  for (int r = 0; r < rows.count; ++r) {
    float* row = scores + r * kTileTokens;
    const Vec m_used = set1(m_tile[r]);
    Vec sum = zero();
    for (int j = 0; j < num_vecs * kLanes; j += kLanes) {
      Vec p = exp2(sub(load(row + j), m_used));
      sum = add(sum, p);
      if constexpr (Kv::kHasScales) p = mul(p, load(tile.value_scales + j));
      store(row + j, p);
    }
    float* l = states->l_lanes + r * kLanes;
    store(l, fma(load(l), set1(alpha[r]), sum));
  }
}

CHAIRLIFT_INLINE void add_up_lanes(int num_rows, RowStates* states) {
  for (int r = 0; r < num_rows; ++r) states->l[r] = reduce_add(load(states->l_lanes + r * kLanes));
}

// Adds a later split's row (m, l, o) to an earlier one's, in place. A side that saw no token (l = 0) leaves the other.
CHAIRLIFT_INLINE void fold_row(int padded_dim, float m, float l, const float* o, float* m_sum, float* l_sum,
                               float* o_sum) {
  if (l == 0.0f) return;
  if (*l_sum == 0.0f) {
    *m_sum = m;
    *l_sum = l;
    std::memcpy(o_sum, o, static_cast<size_t>(padded_dim) * sizeof(float));
    return;
  }
  const float largest = m > *m_sum ? m : *m_sum;
  float powers[kLanes];
  store(powers, exp2(set1(*m_sum - largest)));
  const float old_factor = powers[0];
  store(powers, exp2(set1(m - largest)));
  const float new_factor = powers[0];
  *m_sum = largest;
  *l_sum = *l_sum * old_factor + l * new_factor;
  for (int d = 0; d < padded_dim; d += kLanes) {
    store(o_sum + d, fma(load(o + d), set1(new_factor), mul(load(o_sum + d), set1(old_factor))));
  }
}

// The finished row: o / l. Adding 0 makes every zero positive, whichever masked products it met.
CHAIRLIFT_INLINE void write_row(int head_dim, float l, const float* o, float* out) {
  const Vec inverse = set1(l > 0.0f ? 1.0f / l : 0.0f);
  for (int d = 0; d < head_dim; d += kLanes) {
    const Vec v = add(mul(load(o + d), inverse), zero());
    if (head_dim - d >= kLanes) {
      store(out + d, v);
    } else {
      store_partial(out + d, v, head_dim - d);
    }
  }
}
