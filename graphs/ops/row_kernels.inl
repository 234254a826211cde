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
