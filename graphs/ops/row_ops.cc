// RmsNormQuantize, AddRmsNormQuantize, Rescale, SwiGluQuantize, Quantize: what stands between two integer GEMMs of the
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
constexpr double kRescaleNs = 0.16;

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

struct Rescale {
  static constexpr const char* kName = "Rescale";
  static constexpr Port kInputs[] = {{"acc", ElementType::int32},
                                     {"row_params", ElementType::float32},
                                     {"col_scale", ElementType::float32},
                                     {"col_sum", ElementType::int32},
                                     {"bias", ElementType::float32, true}};
  static constexpr Port kOutputs[] = {{"y", ElementType::float32}};
  // One task: this many columns, whose scales and sums stay in the first-level cache, of this many rows.
  static constexpr int64_t kTileColumns = 2048;
  static constexpr int64_t kTileRows = 16;

  Status init(const Attributes&) { return nullptr; }

  Status compute(Context& context) const {
    GemmInput in;
    CHAIRLIFT_TRY(in.read(context, 0));
    CHAIRLIFT_TRY(in.read_bias(context, 4));
    TensorView y;
    CHAIRLIFT_TRY(context.output(0, {in.num_rows, in.width}, &y));
    const RowKernels& kernels = CHAIRLIFT_DISPATCH(row_kernels());
    const int64_t num_column_tiles = (in.width + kTileColumns - 1) / kTileColumns;
    const int64_t num_row_tiles = (in.num_rows + kTileRows - 1) / kTileRows;
    const int64_t work_ns = static_cast<int64_t>(kRescaleNs * static_cast<double>(in.num_rows * in.width));
    return context.parallel_for(static_cast<size_t>(num_column_tiles * num_row_tiles), work_ns, [&](size_t tile) {
      const int64_t column = static_cast<int64_t>(tile) % num_column_tiles * kTileColumns;
      const int64_t first_row = static_cast<int64_t>(tile) / num_column_tiles * kTileRows;
      const int64_t num_columns = std::min(kTileColumns, in.width - column);
      for (int64_t row = first_row; row < std::min(first_row + kTileRows, in.num_rows); ++row) {
        GemmRow part = in.row(row);
        part.acc += column;
        part.columns.scale += column;
        part.columns.sum += column;
        if (part.columns.bias != nullptr) part.columns.bias += column;
        kernels.rescale(part, num_columns, y.as<float>() + row * in.width + column);
      }
    });
  }
};

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
  static constexpr Port kInputs[] = {{"residual", ElementType::float32},  {"acc", ElementType::int32},
                                     {"row_params", ElementType::float32}, {"col_scale", ElementType::float32},
                                     {"col_sum", ElementType::int32},      {"weight", ElementType::float32},
                                     {"bias", ElementType::float32, true}};
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
    GemmInput in;
    CHAIRLIFT_TRY(in.read(context, 1));
    CHAIRLIFT_TRY(expect_shape(residual, {in.num_rows, in.width}));
    CHAIRLIFT_TRY(in.read_bias(context, 6));
    CHAIRLIFT_TRY(rotation.check_width(in.width, "'residual'"));
    Norm norm{nullptr, epsilon};
    CHAIRLIFT_TRY(read_norm_weight(context, 5, in.width, &norm));
    TensorView total;
    CHAIRLIFT_TRY(context.output(0, {in.num_rows, in.width}, &total));
    QuantizedOutput out;
    CHAIRLIFT_TRY(out.create(context, 1, in.num_rows, in.width));
    const RowKernels& kernels = CHAIRLIFT_DISPATCH(row_kernels());
    return out.for_each(context, rotation, kNormNs, [&](int64_t row, const QuantizedRow& quantized) {
      const int64_t offset = row * in.width;
      kernels.add_norm_quantize(residual.as<float>() + offset, in.row(row), norm, total.as<float>() + offset,
                                quantized);
    });
  }
};

struct SwiGluQuantize {
  static constexpr const char* kName = "SwiGluQuantize";
  static constexpr Port kInputs[] = {{"acc", ElementType::int32},
                                     {"row_params", ElementType::float32},
                                     {"col_scale", ElementType::float32},
                                     {"col_sum", ElementType::int32}};
  static constexpr Port kOutputs[] = {{"q", ElementType::uint8}, {"row_params_out", ElementType::float32}};
  Rotation rotation;

  Status init(const Attributes& attributes) { return rotation.init(attributes); }

  Status compute(Context& context) const {
    GemmInput in;
    CHAIRLIFT_TRY(in.read(context, 0));
    if (in.width % 2 != 0) {
      return error("'acc' has %lld columns; gate and up need an even number", static_cast<long long>(in.width));
    }
    CHAIRLIFT_TRY(rotation.check_width(in.width / 2, "the gated half of 'acc'"));
    QuantizedOutput out;
    CHAIRLIFT_TRY(out.create(context, 0, in.num_rows, in.width / 2));
    const RowKernels& kernels = CHAIRLIFT_DISPATCH(row_kernels());
    return out.for_each(context, rotation, kSwigluNs, [&](int64_t row, const QuantizedRow& quantized) {
      kernels.swiglu_quantize(in.row(row), quantized);
    });
  }
};

}  // namespace

void append_row_ops(OpList& ops) {
  ops.push_back(custom_op<RmsNormQuantize>());
  ops.push_back(custom_op<AddRmsNormQuantize>());
  ops.push_back(custom_op<Rescale>());
  ops.push_back(custom_op<SwiGluQuantize>());
  ops.push_back(custom_op<Quantize>());
}

}  // namespace chairlift
