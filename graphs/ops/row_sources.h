// Where the rows of the integer GEMM come from: what each op of its family reads ahead of the weights, and how that
// becomes quantised rows. A source is a struct with
//
//   kName, kInputs, kOutputs            of its op; the weights' inputs come behind, and output 0 is the product
//   kChannelNs                          rough cost of a channel of a row on AVX-512
//   init(attributes)                    as of any op
//   read(context, rows)                 checks and describes the inputs; makes the outputs behind the product
//   quantize(kernels, rows, row, out)   one row
#pragma once

#include "op.h"
#include "row_kernels.h"

namespace chairlift {

// The rows of one call. What a source does not have stays null.
struct FloatRows {
  int64_t num_rows;
  int64_t width;        // of a quantised row
  int64_t rotation;     // see QuantizedRow
  const float* x;       // [num_rows, width], of SwiGluLinear [num_rows, 2 * width]
  const float* delta;
  float* total;
  Norm norm;
};

// The attribute `rotation`.
struct Rotation {
  int64_t block = 0;

  Status init(const Attributes& attributes) {
    block = attributes.get("rotation", int64_t{0});
    if (block >= 0 && (block & (block - 1)) == 0) return nullptr;
    return error("rotation is %lld; it must be 0 or a power of two", static_cast<long long>(block));
  }

  // Describes rows of `width` channels, which `what` names.
  Status apply(int64_t num_rows, int64_t width, const char* what, FloatRows* rows) const {
    if (width > kMaxQuantizedWidth) {
      return error("%s has %lld channels; at most %lld keep integer sums within int32", what,
                   static_cast<long long>(width), static_cast<long long>(kMaxQuantizedWidth));
    }
    if (block != 0 && width % block != 0) {
      return error("rotation %lld does not divide the %lld channels of %s", static_cast<long long>(block),
                   static_cast<long long>(width), what);
    }
    rows->num_rows = num_rows;
    rows->width = width;
    rows->rotation = block;
    return nullptr;
  }
};

// The norm ahead of a GEMM: the attribute `epsilon` and the input `norm_weight`.
struct NormAhead {
  float epsilon = 0.0f;

  Status init(const Attributes& attributes) {
    epsilon = attributes.get("epsilon", 1e-5f);
    if (epsilon > 0.0f) return nullptr;
    return error("epsilon is %g; it must be above 0", static_cast<double>(epsilon));
  }

  Status read(const Context& context, size_t index, FloatRows* rows) const {
    TensorView weight;
    CHAIRLIFT_TRY(context.input(index, &weight));
    CHAIRLIFT_TRY(expect_shape(weight, {rows->width}));
    rows->norm = {weight.as<float>(), epsilon};
    return nullptr;
  }
};

// Rows as they are.
struct PlainRows {
  static constexpr const char* kName = "QuantizedLinear";
  static constexpr Port kInputs[] = {{"x", ElementType::float32}};
  static constexpr Port kOutputs[] = {{"y", ElementType::float32}};
  static constexpr double kChannelNs = 0.4;
  Rotation rotation;

  Status init(const Attributes& attributes) { return rotation.init(attributes); }

  Status read(Context& context, FloatRows* rows) const {
    TensorView x;
    CHAIRLIFT_TRY(context.input(0, &x));
    CHAIRLIFT_TRY(expect_rank(x, 2));
    rows->x = x.as<float>();
    return rotation.apply(x.dims[0], x.dims[1], "'x'", rows);
  }

  static void quantize(const RowKernels& kernels, const FloatRows& rows, int64_t row, const QuantizedRow& out) {
    kernels.quantize(rows.x + row * rows.width, out);
  }
};

// Rows divided by their root mean square.
struct NormRows {
  static constexpr const char* kName = "RmsNormLinear";
  static constexpr Port kInputs[] = {{"x", ElementType::float32}, {"norm_weight", ElementType::float32}};
  static constexpr Port kOutputs[] = {{"y", ElementType::float32}};
  static constexpr double kChannelNs = 0.5;
  Rotation rotation;
  NormAhead norm;

  Status init(const Attributes& attributes) {
    CHAIRLIFT_TRY(norm.init(attributes));
    return rotation.init(attributes);
  }

  Status read(Context& context, FloatRows* rows) const {
    TensorView x;
    CHAIRLIFT_TRY(context.input(0, &x));
    CHAIRLIFT_TRY(expect_rank(x, 2));
    rows->x = x.as<float>();
    CHAIRLIFT_TRY(rotation.apply(x.dims[0], x.dims[1], "'x'", rows));
    return norm.read(context, 1, rows);
  }

  static void quantize(const RowKernels& kernels, const FloatRows& rows, int64_t row, const QuantizedRow& out) {
    kernels.norm_quantize(rows.x + row * rows.width, rows.norm, out);
  }
};

// The residual stream after an addition to it, which is an output too, divided by its root mean square.
struct AddNormRows {
  static constexpr const char* kName = "AddRmsNormLinear";
  static constexpr Port kInputs[] = {
      {"residual", ElementType::float32}, {"delta", ElementType::float32}, {"norm_weight", ElementType::float32}};
  static constexpr Port kOutputs[] = {{"y", ElementType::float32}, {"residual_out", ElementType::float32}};
  static constexpr double kChannelNs = 0.5;
  Rotation rotation;
  NormAhead norm;

  Status init(const Attributes& attributes) {
    CHAIRLIFT_TRY(norm.init(attributes));
    return rotation.init(attributes);
  }

  Status read(Context& context, FloatRows* rows) const {
    TensorView residual, delta, total;
    CHAIRLIFT_TRY(context.input(0, &residual));
    CHAIRLIFT_TRY(expect_rank(residual, 2));
    rows->x = residual.as<float>();
    CHAIRLIFT_TRY(rotation.apply(residual.dims[0], residual.dims[1], "'residual'", rows));
    CHAIRLIFT_TRY(context.input(1, &delta));
    CHAIRLIFT_TRY(expect_shape(delta, {rows->num_rows, rows->width}));
    rows->delta = delta.as<float>();
    CHAIRLIFT_TRY(norm.read(context, 2, rows));
    CHAIRLIFT_TRY(context.output(1, {rows->num_rows, rows->width}, &total));
    rows->total = total.as<float>();
    return nullptr;
  }

  static void quantize(const RowKernels& kernels, const FloatRows& rows, int64_t row, const QuantizedRow& out) {
    const int64_t offset = row * rows.width;
    kernels.add_norm_quantize(rows.x + offset, rows.delta + offset, rows.norm, rows.total + offset, out);
  }
};

// silu(gate) * up, of rows that hold the gate half first.
struct GatedRows {
  static constexpr const char* kName = "SwiGluLinear";
  static constexpr Port kInputs[] = {{"gate_up", ElementType::float32}};
  static constexpr Port kOutputs[] = {{"y", ElementType::float32}};
  static constexpr double kChannelNs = 0.8;
  Rotation rotation;

  Status init(const Attributes& attributes) { return rotation.init(attributes); }

  Status read(Context& context, FloatRows* rows) const {
    TensorView gate_up;
    CHAIRLIFT_TRY(context.input(0, &gate_up));
    CHAIRLIFT_TRY(expect_rank(gate_up, 2));
    const int64_t width = gate_up.dims[1];
    if (width % 2 != 0) {
      return error("'gate_up' has %lld columns; gate and up need an even number", static_cast<long long>(width));
    }
    rows->x = gate_up.as<float>();
    return rotation.apply(gate_up.dims[0], width / 2, "the gated half of 'gate_up'", rows);
  }

  static void quantize(const RowKernels& kernels, const FloatRows& rows, int64_t row, const QuantizedRow& out) {
    kernels.swiglu_quantize(rows.x + 2 * row * rows.width, out);
  }
};

}  // namespace chairlift
