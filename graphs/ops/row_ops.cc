// RmsNormQuantize, AddRmsNormQuantize, SwiGluQuantize, Quantize: what stands between two integer GEMMs of the
// w8a8 format. They find out shapes and hand rows to the kernels of the instruction set in use.
#include <algorithm>

#include "ops.h"
#include "row_kernels.h"
#include "row_op_parts.h"

namespace chairlift {
namespace {

// Rough costs on AVX-512, to tell work that pays for a fork from work that does not.
constexpr double kQuantizeNs = 0.4;  // per channel
constexpr double kNormNs = 0.5;
constexpr double kSwigluNs = 0.8;

// Norm weights and epsilon.
Status read_norm_weight(const Context& context, size_t index, int64_t width, Norm* norm) {
  TensorView weight;
  CHAIRLIFT_TRY(context.input(index, &weight));
  CHAIRLIFT_TRY(expect_shape(weight, {width}));
  norm->weight = weight.as<float>();
  return nullptr;
}

Status read_epsilon(const Attributes& attributes, float* epsilon) {
  *epsilon = attributes.get("epsilon", 1e-5f);
  if (*epsilon > 0.0f) return nullptr;
  return error("epsilon is %g; it must be above 0", static_cast<double>(*epsilon));
}

struct Quantize {
  static constexpr const char* kName = "Quantize";
  static constexpr Port kInputs[] = {{"x", ElementType::float32}};
  static constexpr Port kOutputs[] = {{"q", ElementType::uint8}, {"row_params_out", ElementType::float32}};
  Rotation rotation;

  Status init(const Attributes& attributes) { return rotation.init(attributes); }

  Status compute(Context& context) const {
    TensorView x;
    CHAIRLIFT_TRY(context.input(0, &x));
    CHAIRLIFT_TRY(expect_rank(x, 2));
    const int64_t width = x.dims[1];
    CHAIRLIFT_TRY(rotation.check_width(width, "'x'"));
    QuantizedOutput out;
    CHAIRLIFT_TRY(out.create(context, 0, x.dims[0], width));
    const RowKernels& kernels = CHAIRLIFT_DISPATCH(row_kernels());
    return out.for_each(context, rotation, kQuantizeNs, [&](int64_t row, const QuantizedRow& quantized) {
      kernels.quantize(x.as<float>() + row * width, quantized);
    });
  }
};

struct RmsNormQuantize {
  static constexpr const char* kName = "RmsNormQuantize";
  static constexpr Port kInputs[] = {{"x", ElementType::float32}, {"weight", ElementType::float32}};
  static constexpr Port kOutputs[] = {{"q", ElementType::uint8}, {"row_params_out", ElementType::float32}};
  Rotation rotation;
  float epsilon = 0.0f;

  Status init(const Attributes& attributes) {
    CHAIRLIFT_TRY(read_epsilon(attributes, &epsilon));
    return rotation.init(attributes);
  }

  Status compute(Context& context) const {
    TensorView x;
    CHAIRLIFT_TRY(context.input(0, &x));
    CHAIRLIFT_TRY(expect_rank(x, 2));
    const int64_t width = x.dims[1];
    CHAIRLIFT_TRY(rotation.check_width(width, "'x'"));
    Norm norm{nullptr, epsilon};
    CHAIRLIFT_TRY(read_norm_weight(context, 1, width, &norm));
    QuantizedOutput out;
    CHAIRLIFT_TRY(out.create(context, 0, x.dims[0], width));
    const RowKernels& kernels = CHAIRLIFT_DISPATCH(row_kernels());
    return out.for_each(context, rotation, kNormNs, [&](int64_t row, const QuantizedRow& quantized) {
      kernels.norm_quantize(x.as<float>() + row * width, norm, quantized);
    });
  }
};

struct AddRmsNormQuantize {
  static constexpr const char* kName = "AddRmsNormQuantize";
  static constexpr Port kInputs[] = {
      {"residual", ElementType::float32}, {"delta", ElementType::float32}, {"weight", ElementType::float32}};
  static constexpr Port kOutputs[] = {{"residual_out", ElementType::float32},
                                      {"q", ElementType::uint8},
                                      {"row_params_out", ElementType::float32}};
  Rotation rotation;
  float epsilon = 0.0f;

  Status init(const Attributes& attributes) {
    CHAIRLIFT_TRY(read_epsilon(attributes, &epsilon));
    return rotation.init(attributes);
  }

  Status compute(Context& context) const {
    TensorView residual;
    CHAIRLIFT_TRY(context.input(0, &residual));
    CHAIRLIFT_TRY(expect_rank(residual, 2));
    const int64_t num_rows = residual.dims[0];
    const int64_t width = residual.dims[1];
    TensorView delta;
    CHAIRLIFT_TRY(context.input(1, &delta));
    CHAIRLIFT_TRY(expect_shape(delta, {num_rows, width}));
    CHAIRLIFT_TRY(rotation.check_width(width, "'residual'"));
    Norm norm{nullptr, epsilon};
    CHAIRLIFT_TRY(read_norm_weight(context, 2, width, &norm));
    TensorView total;
    CHAIRLIFT_TRY(context.output(0, {num_rows, width}, &total));
    QuantizedOutput out;
    CHAIRLIFT_TRY(out.create(context, 1, num_rows, width));
    const RowKernels& kernels = CHAIRLIFT_DISPATCH(row_kernels());
    return out.for_each(context, rotation, kNormNs, [&](int64_t row, const QuantizedRow& quantized) {
      const int64_t offset = row * width;
      kernels.add_norm_quantize(residual.as<float>() + offset, delta.as<float>() + offset, norm,
                                total.as<float>() + offset, quantized);
    });
  }
};

struct SwiGluQuantize {
  static constexpr const char* kName = "SwiGluQuantize";
  static constexpr Port kInputs[] = {{"gate_up", ElementType::float32}};
  static constexpr Port kOutputs[] = {{"q", ElementType::uint8}, {"row_params_out", ElementType::float32}};
  Rotation rotation;

  Status init(const Attributes& attributes) { return rotation.init(attributes); }

  Status compute(Context& context) const {
    TensorView gate_up;
    CHAIRLIFT_TRY(context.input(0, &gate_up));
    CHAIRLIFT_TRY(expect_rank(gate_up, 2));
    const int64_t width = gate_up.dims[1];
    if (width % 2 != 0) {
      return error("'gate_up' has %lld columns; gate and up need an even number", static_cast<long long>(width));
    }
    CHAIRLIFT_TRY(rotation.check_width(width / 2, "the gated half of 'gate_up'"));
    QuantizedOutput out;
    CHAIRLIFT_TRY(out.create(context, 0, gate_up.dims[0], width / 2));
    const RowKernels& kernels = CHAIRLIFT_DISPATCH(row_kernels());
    return out.for_each(context, rotation, kSwigluNs, [&](int64_t row, const QuantizedRow& quantized) {
      kernels.swiglu_quantize(gate_up.as<float>() + row * width, quantized);
    });
  }
};

}  // namespace

void append_row_ops(OpList& ops) {
  ops.push_back(custom_op<RmsNormQuantize>());
  ops.push_back(custom_op<AddRmsNormQuantize>());
  ops.push_back(custom_op<SwiGluQuantize>());
  ops.push_back(custom_op<Quantize>());
}

}  // namespace chairlift
