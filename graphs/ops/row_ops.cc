// RmsNormQuantize, AddRmsNormQuantize, Rescale, SwiGluQuantize, Quantize: what stands between two integer GEMMs of the
// w8a8 format. They find out shapes and hand rows to the kernels of the instruction set in use.
#include <algorithm>
#include <atomic>

#include "ops.h"
#include "row_kernels.h"
#include "thread_scratch.h"

namespace chairlift {
namespace {

// Rough costs on AVX-512, to tell work that pays for a fork from work that does not.
constexpr double kQuantizeNs = 0.4;  // per channel
constexpr double kNormNs = 0.7;
constexpr double kSwigluNs = 0.9;
constexpr double kRescaleNs = 0.16;
constexpr double kTaskNs = 5000.0;  // aimed at per task of a fork: enough to hide handing it out

// Calls body(row) for all rows, in parallel in runs of rows when there is enough to do.
template <class Body>
Status for_rows(Context& context, int64_t num_rows, double row_ns, const Body& body) {
  const int64_t run = std::max<int64_t>(1, static_cast<int64_t>(kTaskNs / row_ns));
  const size_t num_runs = static_cast<size_t>((num_rows + run - 1) / run);
  return context.parallel_for(num_runs, static_cast<int64_t>(row_ns * static_cast<double>(num_rows)), [&](size_t i) {
    const int64_t first = static_cast<int64_t>(i) * run;
    for (int64_t row = first; row < std::min(first + run, num_rows); ++row) body(row);
  });
}

// The attribute `rotation` of the ops that quantise.
struct Rotation {
  int64_t block = 0;

  Status init(const Attributes& attributes) {
    block = attributes.get("rotation", int64_t{0});
    if (block >= 0 && (block & (block - 1)) == 0) return nullptr;
    return error("rotation is %lld; it must be 0 or a power of two", static_cast<long long>(block));
  }

  Status check_width(int64_t width, const char* what) const {
    if (width > kMaxQuantizedWidth) {
      return error("%s has %lld channels; at most %lld keep integer sums within int32", what,
                   static_cast<long long>(width), static_cast<long long>(kMaxQuantizedWidth));
    }
    if (block == 0 || width % block == 0) return nullptr;
    return error("rotation %lld does not divide the %lld channels of %s", static_cast<long long>(block),
                 static_cast<long long>(width), what);
  }
};

// The outputs q and row_params, and the loop over their rows.
struct QuantizedOutput {
  int64_t num_rows = 0;
  int64_t width = 0;
  TensorView q;
  TensorView row_params;

  Status create(Context& context, size_t index, int64_t rows, int64_t channels) {
    num_rows = rows;
    width = channels;
    CHAIRLIFT_TRY(context.output(index, {rows, channels}, &q));
    return context.output(index + 1, {rows, 2}, &row_params);
  }

  // Calls body(row, QuantizedRow) for all rows.
  template <class Body>
  Status for_each(Context& context, const Rotation& rotation, double channel_ns, const Body& body) const {
    std::atomic<bool> is_out_of_memory{false};
    const double row_ns = channel_ns * static_cast<double>(std::max<int64_t>(width, 1));
    CHAIRLIFT_TRY(for_rows(context, num_rows, row_ns, [&](int64_t row) {
      float* scratch = static_cast<float*>(thread_scratch(static_cast<size_t>(std::max<int64_t>(width, 1)) * sizeof(float)));
      if (scratch == nullptr) {
        is_out_of_memory.store(true, std::memory_order_relaxed);
        return;
      }
      body(row, QuantizedRow{width, rotation.block, scratch, q.as<uint8_t>() + row * width,
                             row_params.as<RowParams>() + row});
    }));
    return is_out_of_memory ? error("no memory for a row of %lld floats", static_cast<long long>(width)) : nullptr;
  }
};

// The inputs that describe the result of an integer GEMM: acc, row_params, col_scale, col_sum in a row, bias apart.
struct GemmInput {
  int64_t num_rows = 0;
  int64_t width = 0;
  const int32_t* acc = nullptr;
  const RowParams* params = nullptr;
  Columns columns{};

  Status read(const Context& context, size_t index) {
    TensorView tensor;
    CHAIRLIFT_TRY(context.input(index, &tensor));
    CHAIRLIFT_TRY(expect_rank(tensor, 2));
    num_rows = tensor.dims[0];
    width = tensor.dims[1];
    acc = tensor.as<int32_t>();
    CHAIRLIFT_TRY(context.input(index + 1, &tensor));
    CHAIRLIFT_TRY(expect_shape(tensor, {num_rows, 2}));
    params = tensor.as<RowParams>();
    CHAIRLIFT_TRY(check_zero_points(tensor.name));
    CHAIRLIFT_TRY(context.input(index + 2, &tensor));
    CHAIRLIFT_TRY(expect_shape(tensor, {width}));
    columns.scale = tensor.as<float>();
    CHAIRLIFT_TRY(context.input(index + 3, &tensor));
    CHAIRLIFT_TRY(expect_shape(tensor, {width}));
    columns.sum = tensor.as<int32_t>();
    return nullptr;
  }

  Status read_bias(const Context& context, size_t index) {
    TensorView tensor;
    CHAIRLIFT_TRY(context.input(index, &tensor));
    if (!tensor.is_present) return nullptr;
    CHAIRLIFT_TRY(expect_shape(tensor, {width}));
    columns.bias = tensor.as<float>();
    return nullptr;
  }

  GemmRow row(int64_t i) const { return {acc + i * width, params[i], columns}; }

 private:
  Status check_zero_points(const char* name) const {
    for (int64_t i = 0; i < num_rows; ++i) {
      const float zero_point = params[i].zero_point;
      if (zero_point >= 0.0f && zero_point <= 255.0f) continue;
      return error("'%s' row %lld has zero point %g; it must be within 0 and 255", name, static_cast<long long>(i),
                   static_cast<double>(zero_point));
    }
    return nullptr;
  }
};

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
      kernels.add_norm_quantize(residual.as<float>() + offset, in.row(row), norm, total.as<float>() + offset, quantized);
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
