// Row-wise kernels, compiled once per instruction set. Each row makes a few passes over at most a few KB that stay in
// the first-level cache, and depends on nothing but its own inputs. Additions and multiplications of `quantize` are
// separately rounded and in a fixed order, so its results are the same bits on every set.
#include "row_kernels.h"
#include "rotate_row.inl"

namespace chairlift::CHAIRLIFT_SIMD_NS {
namespace {

// Quantises out.scratch. Rows without a finite range, or with one too small for a normal scale, are the two special
// cases of the twin `quantize_rows`.
void quantize_scratch(const QuantizedRow& out, const Range& range) {
  const float low = reduce_min(range.low);
  const bool is_finite = reduce_add(range.poison) == 0.0f;
  const float scale = (reduce_max(range.high) - low) * (1.0f / 255.0f);
  if (!is_finite || !(scale >= 0x1p-126f)) {
    *out.params = {is_finite ? 1.0f : __builtin_nanf(""), 0.0f};
    std::memset(out.q, 0, static_cast<size_t>(out.width));
    return;
  }
  const Vec top = set1(255.0f);
  const Vec factor = set1(1.0f / scale);
  const Vec zero_point = min(max(round(mul(set1(-low), factor)), zero()), top);
  *out.params = {scale, reduce_max(zero_point)};
  const Words offset = round_words(zero_point);
  const auto steps = [&](int64_t i, int lanes) __attribute__((always_inline)) {
    return add(round_words(mul(load_lanes(out.scratch + i, lanes), factor)), offset);
  };
  constexpr int kBytes = 4 * kLanes;  // stored at a time
  int64_t i = 0;
  Words four[4];
  for (; i + kBytes <= out.width; i += kBytes) {
    for (int v = 0; v < 4; ++v) four[v] = steps(i + v * kLanes, kLanes);
    store_bytes(out.q + i, four);
  }
  if (i == out.width) return;
  for (int v = 0; v < 4; ++v) {
    const int64_t left = out.width - i - v * kLanes;
    four[v] = left > 0 ? steps(i + v * kLanes, static_cast<int>(left < kLanes ? left : kLanes)) : offset;
  }
  uint8_t rest[kBytes];
  store_bytes(rest, four);
  std::memcpy(out.q + i, rest, static_cast<size_t>(out.width - i));
}

// Normalises `x` by its mean square, rotates and quantises it.
void normalize_and_quantize(const float* x, float sum_of_squares, const Norm& norm, const QuantizedRow& out) {
  const float mean_square = sum_of_squares / static_cast<float>(out.width);
  const Vec factor = set1(rotation_factor(out.rotation) / __builtin_sqrtf(mean_square + norm.epsilon));
  const auto normalized = [&](int64_t i, int lanes) __attribute__((always_inline)) {
    return mul(mul(load_lanes(x + i, lanes), factor), load_lanes(norm.weight + i, lanes));
  };
  quantize_scratch(out, rotate(out, normalized));
}

void quantize(const float* x, const QuantizedRow& out) {
  const Vec factor = set1(rotation_factor(out.rotation));
  quantize_scratch(out, rotate(out, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    return mul(load_lanes(x + i, lanes), factor);
  }));
}

void norm_quantize(const float* x, const Norm& norm, const QuantizedRow& out) {
  Vec squares = zero();
  for_vectors(out.width, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    const Vec v = load_lanes(x + i, lanes);
    squares = fma(v, v, squares);
  });
  normalize_and_quantize(x, reduce_add(squares), norm, out);
}

void add_norm_quantize(const float* residual, const float* delta, const Norm& norm, float* total,
                       const QuantizedRow& out) {
  Vec squares = zero();
  for_vectors(out.width, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    const Vec v = add(load_lanes(residual + i, lanes), load_lanes(delta + i, lanes));
    store_lanes(total + i, v, lanes);
    squares = fma(v, v, squares);
  });
  normalize_and_quantize(total, reduce_add(squares), norm, out);
}

void swiglu_quantize(const float* gate_up, const QuantizedRow& out) {
  const Vec factor = set1(rotation_factor(out.rotation));
  const auto gated = [&](int64_t i, int lanes) __attribute__((always_inline)) {
    const Vec gate = load_lanes(gate_up + i, lanes);
    const Vec up = load_lanes(gate_up + out.width + i, lanes);
    const Vec exponent = max(min(sub(zero(), gate), set1(87.0f)), set1(-87.0f));
    const Vec sigmoid = reciprocal(add(set1(1.0f), exp_within(exponent)));
    return mul(mul(mul(gate, sigmoid), up), factor);
  };
  quantize_scratch(out, rotate(out, gated));
}

}  // namespace

const RowKernels& row_kernels() {
  static constexpr RowKernels kernels = {quantize, norm_quantize, add_norm_quantize, swiglu_quantize};
  return kernels;
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
