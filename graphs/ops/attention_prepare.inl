// Norm, rotation and KV write of one token's heads. Included by paged_attention.inl, inside its namespace.

// y = x [dim]; zeros behind, to a whole vector.
CHAIRLIFT_INLINE void copy_head(const float* x, int dim, float* y) {
  for (int d = 0; d < dim; d += kLanes) store(y + d, load_some<KvFloat32>(x + d, dim - d));
}

// y = x, RMS-normalised and weighted when there is a weight. [dim] each; y is padded to a whole vector.
CHAIRLIFT_INLINE void norm_head(const float* x, const float* weight, float epsilon, int dim, float* y) {
  if (weight == nullptr) {
    copy_head(x, dim, y);
    return;
  }
  Vec squares = zero();
  for (int d = 0; d < dim; d += kLanes) {
    const Vec v = load_some<KvFloat32>(x + d, dim - d);
    squares = fma(v, v, squares);
  }
  const Vec mean = set1(reduce_add(squares) / static_cast<float>(dim));
  const Vec factor = div(set1(1.0f), sqrt(add(mean, set1(epsilon))));
  for (int d = 0; d < dim; d += kLanes) {
    const int count = dim - d;
    const Vec v = mul(mul(load_some<KvFloat32>(x + d, count), factor), load_some<KvFloat32>(weight + d, count));
    if (count >= kLanes) {
      store(y + d, v);
    } else {
      store_partial(y + d, v, count);
    }
  }
}

// Rotates the pairs (y[i], y[i + half]) by the angles whose cosines and sines are given, in place.
CHAIRLIFT_INLINE void rotate_head(const float* cos, const float* sin, int half, float* y) {
  for (int i = 0; i < half; i += kLanes) {
    const int count = half - i;
    const Vec c = load_some<KvFloat32>(cos + i, count);
    const Vec s = load_some<KvFloat32>(sin + i, count);
    const Vec first = load_some<KvFloat32>(y + i, count);
    const Vec second = load_some<KvFloat32>(y + half + i, count);
    const Vec rotated_first = sub(mul(first, c), mul(second, s));
    const Vec rotated_second = add(mul(second, c), mul(first, s));
    if (count >= kLanes) {
      store(y + i, rotated_first);
      store(y + half + i, rotated_second);
    } else {
      store_partial(y + i, rotated_first, count);
      store_partial(y + half + i, rotated_second, count);
    }
  }
}

// The `write_...` store a head at `out`, padded to a multiple of kLanes as `y` [dim] is.
CHAIRLIFT_INLINE void write_float16(const float* y, int dim, uint16_t* out) {
  const Vec most = set1(65504.0f);  // saturate: an infinity would turn masked products into NaN
  for (int d = 0; d < dim; d += kLanes) store_f16(out + d, min(most, max(set1(-65504.0f), load(y + d))));
}

// Returns the scale.
CHAIRLIFT_INLINE float write_int8(const float* y, int dim, int8_t* out) {
  Vec largest = zero();
  for (int d = 0; d < dim; d += kLanes) largest = max(largest, abs(load(y + d)));
  const float most = reduce_max(largest);
  const Vec inverse = set1(most > 0.0f ? 127.0f / most : 0.0f);
  for (int d = 0; d < dim; d += kLanes) {
    store_i8(out + d, min(set1(127.0f), max(set1(-127.0f), round(mul(load(y + d), inverse)))));
  }
  return most / 127.0f;
}

// A head's key or value goes to token `offset` of the run at `head`.
template <class Element>
CHAIRLIFT_INLINE void place_head(const AttentionCall& call, const Element* y, bool is_key, int64_t offset,
                                 uint8_t* head) {
  if (!is_key) {
    std::memcpy(head + offset * call.token_bytes, y, static_cast<size_t>(call.token_bytes));
    return;
  }
  const int64_t in_group = offset % call.key_group;
  Element* out = reinterpret_cast<Element*>(head + (offset - in_group) * call.token_bytes) + in_group;
  for (int d = 0; d < call.head_dim; ++d) out[d * call.key_group] = y[d];
}

CHAIRLIFT_INLINE void write_head(const AttentionCall& call, const float* y, bool is_key, int64_t offset,
                                 uint8_t* head) {
  switch (call.kv_type) {
    case KvType::float32: place_head(call, y, is_key, offset, head); break;
    case KvType::float16: {
      alignas(64) uint16_t halves[kMaxHeadDim];
      write_float16(y, call.head_dim, halves);
      place_head(call, halves, is_key, offset, head);
      break;
    }
    case KvType::int8: {
      alignas(64) int8_t bytes[kMaxHeadDim];
      const float scale = write_int8(y, call.head_dim, bytes);
      place_head(call, bytes, is_key, offset, head);
      std::memcpy(head + call.block_size * call.token_bytes + offset * sizeof(float), &scale, sizeof(scale));
      break;
    }
  }
}

static void prepare(const AttentionCall& call, int64_t token, int32_t kv_head) {
  const int dim = call.head_dim;
  const int half = static_cast<int>(call.rotary_half);
  float* out = call.out + (token * call.num_heads + static_cast<int64_t>(kv_head) * call.group_size) * dim;
  if (token >= call.cu_seqlens[call.num_seqs]) {
    std::memset(out, 0, static_cast<size_t>(call.group_size) * dim * sizeof(float));
    return;
  }
  const float* heads = call.qkv + token * (call.num_heads + 2 * call.num_kv_heads) * dim;
  const float* cos = call.cos + call.positions[token] * call.rotary_half;
  const float* sin = call.sin + call.positions[token] * call.rotary_half;
  alignas(64) float y[kMaxHeadDim] = {};
  const Vec scale = set1(call.score_scale);
  for (int i = 0; i < call.group_size; ++i) {
    norm_head(heads + (static_cast<int64_t>(kv_head) * call.group_size + i) * dim, call.q_norm, call.norm_epsilon, dim,
              y);
    rotate_head(cos, sin, half, y);
    for (int d = 0; d < dim; d += kLanes) {
      const Vec scaled = mul(load(y + d), scale);
      if (dim - d >= kLanes) {
        store(out + i * dim + d, scaled);
      } else {
        store_partial(out + i * dim + d, scaled, dim - d);
      }
    }
  }

  const int64_t slot = call.slot_mapping[token];
  if (slot < 0) return;
  uint8_t* head = call.kv_cache + slot / call.block_size * call.block_bytes + kv_head * call.head_bytes;
  const int64_t offset = slot % call.block_size;
  norm_head(heads + (call.num_heads + kv_head) * dim, call.k_norm, call.norm_epsilon, dim, y);
  rotate_head(cos, sin, half, y);
  write_head(call, y, true, offset, head);
  copy_head(heads + (call.num_heads + call.num_kv_heads + kv_head) * dim, dim, y);
  write_head(call, y, false, offset, head + call.value_bytes);
}
