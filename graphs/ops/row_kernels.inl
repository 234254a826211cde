// Row-wise kernels, compiled once per instruction set. Each row makes a few passes over at most a few KB that stay in
// the first-level cache, and depends on nothing but its own inputs. Additions and multiplications of `rescale` and
// `quantize` are separately rounded and in a fixed order, so their results are the same bits on every set.
#include "row_kernels.h"
#include "simd.h"
#include "simd_words.h"

namespace chairlift::CHAIRLIFT_SIMD_NS {
namespace {

// Calls body(offset, lanes) for whole vectors and then for the rest; `lanes` is kLanes for whole vectors, so that the
// loads and stores below turn into unmasked ones there.
template <class Body>
CHAIRLIFT_INLINE void for_vectors(int64_t width, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i, kLanes);
  if (i < width) body(i, static_cast<int>(width - i));
}

CHAIRLIFT_INLINE Vec load_lanes(const float* p, int lanes) { return lanes == kLanes ? load(p) : load_partial(p, lanes); }
CHAIRLIFT_INLINE Words load_lanes(const int32_t* p, int lanes) {
  return lanes == kLanes ? load_words(p) : load_words_partial(p, lanes);
}
CHAIRLIFT_INLINE void store_lanes(float* p, Vec v, int lanes) {
  if (lanes == kLanes) {
    store(p, v);
  } else {
    store_partial(p, v, lanes);
  }
}

// The columns of a GEMM's row as floats, kLanes at a time.
struct Rescaler {
  GemmRow in;
  Vec row_scale;
  Words zero_point;

  explicit Rescaler(const GemmRow& row)
      : in(row), row_scale(set1(row.params.scale)), zero_point(words(static_cast<uint32_t>(row.params.zero_point))) {}

  __attribute__((always_inline)) Vec at(int64_t i, int lanes) const {
    const Words correction = mul(zero_point, load_lanes(in.columns.sum + i, lanes));
    const Vec sum = to_float(sub(load_lanes(in.acc + i, lanes), correction));
    const Vec product = mul(mul(row_scale, load_lanes(in.columns.scale + i, lanes)), sum);
    return in.columns.bias == nullptr ? product : add(product, load_lanes(in.columns.bias + i, lanes));
  }
};

// Butterflies between kRadix runs of `inner` neighbouring channels: log2(kRadix) stages of the transform at once.
template <int kRadix>
CHAIRLIFT_INLINE void butterflies(float* x, int64_t width, int64_t inner) {
  for (float* group = x; group < x + width; group += kRadix * inner) {
    for_vectors(inner, [&](int64_t i, int lanes) __attribute__((always_inline)) {
      Vec v[kRadix];
      for (int r = 0; r < kRadix; ++r) v[r] = load_lanes(group + r * inner + i, lanes);
      for (int half = 1; half < kRadix; half *= 2) {
        for (int r = 0; r < kRadix; ++r) {
          if (r & half) continue;
          const Vec low = v[r];
          v[r] = add(low, v[r + half]);
          v[r + half] = sub(low, v[r + half]);
        }
      }
      for (int r = 0; r < kRadix; ++r) store_lanes(group + r * inner + i, v[r], lanes);
    });
  }
}

// Fast Walsh-Hadamard transform of every strided block, not normalised. Three stages a pass: what fits 16 registers.
void rotate(float* x, int64_t width, int64_t rotation) {
  int64_t inner = width / rotation;
  while (rotation > 1) {
    const int radix = rotation >= 8 ? 8 : static_cast<int>(rotation);
    if (radix == 8) butterflies<8>(x, width, inner);
    if (radix == 4) butterflies<4>(x, width, inner);
    if (radix == 2) butterflies<2>(x, width, inner);
    inner *= radix;
    rotation /= radix;
  }
}

// What the channels are multiplied by before `rotate`, to make the transform orthogonal.
CHAIRLIFT_INLINE float rotation_factor(int64_t rotation) {
  return rotation == 0 ? 1.0f : static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(rotation)));
}

struct Range {
  float low;   // at most 0
  float high;  // at least 0
  bool is_finite;
};

Range range_of(const float* x, int64_t width) {
  Vec low = zero();
  Vec high = zero();
  Vec poison = zero();  // 0 * x is NaN for NaN and the infinities
  for_vectors(width, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    const Vec v = load_lanes(x + i, lanes);
    low = min(v, low);
    high = max(v, high);
    poison = add(poison, mul(v, zero()));
  });
  return {reduce_min(low), reduce_max(high), reduce_add(poison) == 0.0f};
}

// Rotates and quantises out.scratch. Rows without a finite range, or with one too small for a normal scale, are the
// two special cases of the twin `quantize_rows`.
void rotate_and_quantize(const QuantizedRow& out) {
  if (out.rotation > 1) rotate(out.scratch, out.width, out.rotation);
  const Range range = range_of(out.scratch, out.width);
  const float scale = (range.high - range.low) * (1.0f / 255.0f);
  if (!range.is_finite || !(scale >= 0x1p-126f)) {
    *out.params = {range.is_finite ? 1.0f : __builtin_nanf(""), 0.0f};
    std::memset(out.q, 0, static_cast<size_t>(out.width));
    return;
  }
  const float inverse = 1.0f / scale;
  const Vec top = set1(255.0f);
  const Vec factor = set1(inverse);
  const Vec zero_point = min(max(round(mul(set1(-range.low), factor)), zero()), top);
  float lanes_of_zero_point[kLanes];
  store(lanes_of_zero_point, zero_point);
  *out.params = {scale, lanes_of_zero_point[0]};
  for_vectors(out.width, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    const Vec steps = add(round(mul(load_lanes(out.scratch + i, lanes), factor)), zero_point);
    const Vec clamped = min(max(steps, zero()), top);
    if (lanes == kLanes) {
      store_u8(out.q + i, clamped);
    } else {
      uint8_t rest[kLanes];
      store_u8(rest, clamped);
      std::memcpy(out.q + i, rest, static_cast<size_t>(lanes));
    }
  });
}

// Normalises `x` by its mean square into out.scratch and quantises it.
void normalize_and_quantize(const float* x, float sum_of_squares, const Norm& norm, const QuantizedRow& out) {
  const float mean_square = sum_of_squares / static_cast<float>(out.width);
  const Vec factor = set1(rotation_factor(out.rotation) / __builtin_sqrtf(mean_square + norm.epsilon));
  for_vectors(out.width, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    const Vec weight = load_lanes(norm.weight + i, lanes);
    store_lanes(out.scratch + i, mul(mul(load_lanes(x + i, lanes), factor), weight), lanes);
  });
  rotate_and_quantize(out);
}

void rescale(const GemmRow& in, int64_t width, float* out) {
  const Rescaler columns(in);
  for_vectors(width, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    store_lanes(out + i, columns.at(i, lanes), lanes);
  });
}

void quantize(const float* x, const QuantizedRow& out) {
  const Vec factor = set1(rotation_factor(out.rotation));
  for_vectors(out.width, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    store_lanes(out.scratch + i, mul(load_lanes(x + i, lanes), factor), lanes);
  });
  rotate_and_quantize(out);
}

void norm_quantize(const float* x, const Norm& norm, const QuantizedRow& out) {
  Vec squares = zero();
  for_vectors(out.width, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    const Vec v = load_lanes(x + i, lanes);
    squares = fma(v, v, squares);
  });
  normalize_and_quantize(x, reduce_add(squares), norm, out);
}

void add_norm_quantize(const float* residual, const GemmRow& in, const Norm& norm, float* total,
                       const QuantizedRow& out) {
  const Rescaler columns(in);
  Vec squares = zero();
  for_vectors(out.width, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    const Vec v = add(load_lanes(residual + i, lanes), columns.at(i, lanes));
    store_lanes(total + i, v, lanes);
    squares = fma(v, v, squares);
  });
  normalize_and_quantize(total, reduce_add(squares), norm, out);
}

void swiglu_quantize(const GemmRow& in, const QuantizedRow& out) {
  const Rescaler columns(in);
  const Vec factor = set1(rotation_factor(out.rotation));
  for_vectors(out.width, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    const Vec gate = columns.at(i, lanes);
    const Vec up = columns.at(out.width + i, lanes);
    const Vec silu = div(gate, add(set1(1.0f), exp(sub(zero(), gate))));
    store_lanes(out.scratch + i, mul(mul(silu, up), factor), lanes);
  });
  rotate_and_quantize(out);
}

}  // namespace

const RowKernels& row_kernels() {
  static constexpr RowKernels kernels = {rescale, quantize, norm_quantize, add_norm_quantize, swiglu_quantize};
  return kernels;
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
