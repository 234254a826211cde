// QuantizedLinear: a GEMM of quantised rows and int8 weights that yields floats.
#include <algorithm>

#include "linear_kernels.h"
#include "op.h"
#include "ops.h"
#include "thread_scratch.h"

namespace chairlift {
namespace {

// Rough costs of one thread, to cut a call into tasks.
constexpr double kPrepareNs = 0.25;       // per activation
constexpr double kBytesPerNs = 16.0;      // weights read from memory
constexpr double kProductsPerNs = 60.0;
constexpr double kTaskNs = 8'000.0;       // aimed at
constexpr int64_t kTaskMultiple = 4;      // so many tasks, or a multiple: equal shares for 2 and for 4 threads; in
                                          // small calls one for each widest tile
constexpr int64_t kMaxTasks = 64;

// Runs of panels of nearly equal length, each a multiple of `step` but for the last.
struct Tasks {
  size_t count;
  int64_t total_ns;
  int64_t step;
  int64_t num_panels;

  int64_t first_panel(size_t task) const {
    const int64_t num_steps = (num_panels + step - 1) / step;
    const int64_t first_step = static_cast<int64_t>(task) * num_steps / static_cast<int64_t>(count);
    return std::min(first_step * step, num_panels);
  }
};

Tasks cut(const LinearCall& call, int64_t step) {
  const double num_bytes = static_cast<double>(call.num_panels() * call.panel_bytes());
  const double total_ns =
      std::max(num_bytes / kBytesPerNs, num_bytes * static_cast<double>(call.num_rows) / kProductsPerNs);
  const int64_t wanted = (static_cast<int64_t>(total_ns / kTaskNs) / kTaskMultiple + 1) * kTaskMultiple;
  const int64_t most = (call.num_panels() + step - 1) / step;
  const size_t count = static_cast<size_t>(std::min({wanted, most, kMaxTasks}));
  return {count, static_cast<int64_t>(total_ns), step, call.num_panels()};
}

struct QuantizedLinear {
  static constexpr const char* kName = "QuantizedLinear";
  static constexpr Port kInputs[] = {
      {"q", ElementType::uint8},         {"row_params", ElementType::float32}, {"weights", ElementType::int8},
      {"col_scale", ElementType::float32}, {"col_sum", ElementType::int32},    {"bias", ElementType::float32, true}};
  static constexpr Port kOutputs[] = {{"y", ElementType::float32}};

  Status init(const Attributes&) { return nullptr; }

  Status compute(Context& context) const {
    LinearCall call{};
    CHAIRLIFT_TRY(read(context, &call));
    TensorView y;
    CHAIRLIFT_TRY(context.output(0, {call.num_rows, call.out_features}, &y));
    call.y = y.as<float>();
    if (call.num_rows == 0) return nullptr;
    const LinearKernels& kernels = active_linear_kernels();
    const size_t num_bytes = static_cast<size_t>(kernels.prepared_bytes(call.num_rows, call.num_groups()));
    void* prepared = thread_scratch(num_bytes);
    if (prepared == nullptr) return error("no memory for %zu bytes of rows", num_bytes);
    const int64_t prepare_ns = static_cast<int64_t>(kPrepareNs * static_cast<double>(call.num_rows * call.in_features));
    CHAIRLIFT_TRY(context.parallel_for(
        static_cast<size_t>(kernels.num_strips(call.num_rows)), prepare_ns,
        [&](size_t strip) { kernels.prepare(call, static_cast<int64_t>(strip), prepared); }));
    const Tasks tasks = cut(call, kernels.task_panels);
    return context.parallel_for(tasks.count, tasks.total_ns, [&](size_t task) {
      kernels.compute(call, tasks.first_panel(task), tasks.first_panel(task + 1), prepared);
    });
  }

 private:
  static Status read(const Context& context, LinearCall* call) {
    TensorView q, params, weights, scale, sum, bias;
    CHAIRLIFT_TRY(context.input(0, &q));
    CHAIRLIFT_TRY(expect_rank(q, 2));
    call->num_rows = q.dims[0];
    call->in_features = q.dims[1];
    call->q = q.as<uint8_t>();
    if (call->in_features > kMaxQuantizedWidth) {
      return error("'q' has %lld channels; at most %lld keep integer sums within int32",
                   static_cast<long long>(call->in_features), static_cast<long long>(kMaxQuantizedWidth));
    }
    CHAIRLIFT_TRY(context.input(1, &params));
    CHAIRLIFT_TRY(expect_shape(params, {call->num_rows, 2}));
    call->params = params.as<RowParams>();
    CHAIRLIFT_TRY(check_zero_points(*call));
    CHAIRLIFT_TRY(context.input(3, &scale));
    CHAIRLIFT_TRY(expect_rank(scale, 1));
    call->out_features = scale.dims[0];
    call->columns.scale = scale.as<float>();
    CHAIRLIFT_TRY(context.input(2, &weights));
    CHAIRLIFT_TRY(expect_shape(weights, {call->num_panels(), call->num_groups(), kPanelColumns, kGroupChannels}));
    call->weights = weights.as<int8_t>();
    CHAIRLIFT_TRY(context.input(4, &sum));
    CHAIRLIFT_TRY(expect_shape(sum, {call->out_features}));
    call->columns.sum = sum.as<int32_t>();
    CHAIRLIFT_TRY(context.input(5, &bias));
    if (bias.is_present) CHAIRLIFT_TRY(expect_shape(bias, {call->out_features}));
    call->columns.bias = bias.as<float>();
    return nullptr;
  }

  static Status check_zero_points(const LinearCall& call) {
    for (int64_t i = 0; i < call.num_rows; ++i) {
      const float zero_point = call.params[i].zero_point;
      if (zero_point >= 0.0f && zero_point <= 255.0f) continue;
      return error("'row_params' row %lld has zero point %g; it must be within 0 and 255", static_cast<long long>(i),
                   static_cast<double>(zero_point));
    }
    return nullptr;
  }
};

}  // namespace

const LinearKernels& active_linear_kernels() {
#if CHAIRLIFT_X86
  if (active_isa() == Isa::avx512 && !has_int8_dot()) return avx2::linear_kernels();
#elif CHAIRLIFT_ARM
  if (!has_int8_dot()) return generic::linear_kernels();
#endif
  return CHAIRLIFT_DISPATCH(linear_kernels());
}

void append_linear_ops(OpList& ops) { ops.push_back(custom_op<QuantizedLinear>()); }

}  // namespace chairlift
