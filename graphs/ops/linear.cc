// QuantizedLinear, RmsNormLinear, AddRmsNormLinear, SwiGluLinear: GEMMs of float rows and int8 weights that yield
// floats. Each quantises its rows to 8 bits first, after what its source does to them.
//
// A step of a small batch is some 120 GEMMs of a few microseconds each: besides them the number of nodes and forks is
// what counts. Versions on Zen 5 with AVX-512 VNNI, whole steps of SmolLM2-135M with 1, 4, 16 and 64 sequences and a
// chunk of 160 tokens, in turns, time of the first version over this one's; two threads, then one:
//   rows quantised by a node of their own, then copied    1.00 1.00 1.00 1.00 1.00   1.00 1.00 1.00 1.00 1.00
//   one node and one fork, rows shared by its threads     1.05 1.05 1.03 1.00 0.98   1.04 1.01 1.01 1.00 1.00
//   prepared rows on cache lines of their own             1.07 1.06 1.04 1.01 1.02   1.05 1.01 1.02 1.00 1.01
#include <algorithm>
#include <array>
#include <atomic>

#include "linear_kernels.h"
#include "op.h"
#include "ops.h"
#include "row_sources.h"
#include "shared_rows.h"
#include "thread_scratch.h"

namespace chairlift {
namespace {

// Rough costs of one thread, to cut a call into tasks.
constexpr double kBytesPerNs = 16.0;      // weights read from memory
constexpr double kProductsPerNs = 60.0;
constexpr double kTaskNs = 8'000.0;       // aimed at
constexpr int64_t kTaskMultiple = 4;      // so many tasks, or a multiple: equal shares for 2 and for 4 threads; in
                                          // small calls one for each widest tile
constexpr int64_t kMaxTasks = 64;
constexpr double kRunNs = 2'500.0;        // rows that a task takes at a time
constexpr int64_t kMinRuns = 4;           // where there are as many rows

constexpr Port kWeightInputs[] = {{"weights", ElementType::int8},
                                  {"col_scale", ElementType::float32},
                                  {"col_sum", ElementType::int32},
                                  {"bias", ElementType::float32, true}};

template <size_t n>
constexpr auto with_weights(const Port (&rows)[n]) {
  std::array<Port, n + std::size(kWeightInputs)> ports{};
  for (size_t i = 0; i < ports.size(); ++i) ports[i] = i < n ? rows[i] : kWeightInputs[i - n];
  return ports;
}

// Runs of panels of nearly equal length, each a multiple of `step` but for the last.
struct Tasks {
  size_t count;
  int64_t total_ns;
  int64_t step;
  int64_t num_panels;
  int64_t half;  // 0, or of an even number of tasks of `step` panels: how many the middle one has, and so the last

  int64_t first_panel(size_t task) const {
    const int64_t index = static_cast<int64_t>(task);
    const int64_t num_tasks = static_cast<int64_t>(count);
    if (half > 0) return std::min(index * step - (index < num_tasks / 2 ? 0 : step - half), num_panels);
    const int64_t num_steps = (num_panels + step - 1) / step;
    return std::min(index * num_steps / num_tasks * step, num_panels);
  }
};

Tasks cut(const LinearCall& call, const LinearKernels& kernels) {
  const int64_t step = kernels.task_panels;
  const double num_bytes = static_cast<double>(call.num_panels() * call.panel_bytes());
  const double total_ns =
      std::max(num_bytes / kBytesPerNs, num_bytes * static_cast<double>(call.num_rows) / kProductsPerNs);
  const int64_t wanted = (static_cast<int64_t>(total_ns / kTaskNs) / kTaskMultiple + 1) * kTaskMultiple;
  const int64_t most = std::max<int64_t>((call.num_panels() + step - 1) / step, 1);
  const int64_t count = std::min({wanted, most, kMaxTasks});
  // An odd number of large tasks would leave one of two threads waiting during the last, if that is large too. Each
  // thread begins with a share of its own, the tasks of one behind those of the other: so both get a half.
  const bool is_last_large = call.num_panels() - (most - 1) * step > kernels.half_task_panels;
  const int64_t half = count == most && count % 2 == 1 && is_last_large ? kernels.half_task_panels : 0;
  return {static_cast<size_t>(count + (half > 0)), static_cast<int64_t>(total_ns), step, call.num_panels(), half};
}

// The inputs from `index` on, which `kWeightInputs` names.
Status read_weights(const Context& context, size_t index, LinearCall* call) {
  TensorView weights, scale, sum, bias;
  CHAIRLIFT_TRY(context.input(index + 1, &scale));
  CHAIRLIFT_TRY(expect_rank(scale, 1));
  call->out_features = scale.dims[0];
  call->columns.scale = scale.as<float>();
  CHAIRLIFT_TRY(context.input(index, &weights));
  CHAIRLIFT_TRY(expect_shape(weights, {call->num_panels(), call->num_groups(), kPanelColumns, kGroupChannels}));
  call->weights = weights.as<int8_t>();
  CHAIRLIFT_TRY(context.input(index + 2, &sum));
  CHAIRLIFT_TRY(expect_shape(sum, {call->out_features}));
  call->columns.sum = sum.as<int32_t>();
  CHAIRLIFT_TRY(context.input(index + 3, &bias));
  if (bias.is_present) CHAIRLIFT_TRY(expect_shape(bias, {call->out_features}));
  call->columns.bias = bias.as<float>();
  return nullptr;
}

// Quantises rows and copies them for the GEMM. The int8 rows live in the scratch memory of the task.
struct Quantizer {
  void (*quantize)(const RowKernels& kernels, const FloatRows& rows, int64_t row, const QuantizedRow& out);
  double channel_ns;
  const FloatRows& rows;
  const RowKernels& row_kernels;

  double row_ns() const { return channel_ns * static_cast<double>(std::max<int64_t>(rows.width, 1)); }

  // False when there is no memory.
  bool prepare(const LinearKernels& kernels, const LinearCall& call, int64_t row, RowParams* params,
               void* prepared) const {
    const size_t num_floats = static_cast<size_t>(rows.width + kScratchPadding);
    void* memory = thread_scratch(Scratch::task, num_floats * sizeof(float) + static_cast<size_t>(rows.width));
    if (memory == nullptr) return false;
    float* floats = static_cast<float*>(memory);
    uint8_t* q = reinterpret_cast<uint8_t*>(floats + num_floats);
    quantize(row_kernels, rows, row, {rows.width, rows.rotation, floats, q, params + row});
    kernels.prepare(call, row, q, prepared);
    return true;
  }
};

// One fork: its tasks prepare the rows together, then each multiplies all of them by its columns.
Status multiply(Context& context, LinearCall call, const Quantizer& quantizer) {
  if (call.num_rows == 0) return nullptr;
  const LinearKernels& kernels = active_linear_kernels();
  const size_t prepared_bytes = static_cast<size_t>(kernels.prepared_bytes(call.num_rows, call.in_features));
  const size_t num_bytes = prepared_bytes + static_cast<size_t>(call.num_rows) * sizeof(RowParams);
  void* prepared = thread_scratch(Scratch::call, num_bytes);
  if (prepared == nullptr) return error("no memory for %zu bytes of rows", num_bytes);
  RowParams* params = reinterpret_cast<RowParams*>(static_cast<char*>(prepared) + prepared_bytes);
  call.params = params;

  const int64_t affordable = static_cast<int64_t>(kRunNs / quantizer.row_ns());
  SharedRows rows(call.num_rows, std::max<int64_t>(std::min(affordable, call.num_rows / kMinRuns), 1));
  std::atomic<bool> is_out_of_memory{false};
  const Tasks tasks = cut(call, kernels);
  const int64_t rows_ns = static_cast<int64_t>(quantizer.row_ns() * static_cast<double>(call.num_rows));
  CHAIRLIFT_TRY(context.parallel_for(tasks.count, tasks.total_ns + rows_ns, [&](size_t task) {
    rows.finish([&](int64_t row) {
      if (!quantizer.prepare(kernels, call, row, params, prepared)) is_out_of_memory = true;
    });
    if (is_out_of_memory) return;
    kernels.compute(call, tasks.first_panel(task), tasks.first_panel(task + 1), prepared);
  }));
  return is_out_of_memory ? error("no memory for a row of %lld floats", static_cast<long long>(call.in_features))
                          : nullptr;
}

template <class Source>
struct Linear {
  static constexpr const char* kName = Source::kName;
  static constexpr auto kInputs = with_weights(Source::kInputs);
  static constexpr const auto& kOutputs = Source::kOutputs;
  Source source;

  Status init(const Attributes& attributes) { return source.init(attributes); }

  Status compute(Context& context) const {
    FloatRows rows{};
    CHAIRLIFT_TRY(source.read(context, &rows));
    LinearCall call{};
    call.num_rows = rows.num_rows;
    call.in_features = rows.width;
    CHAIRLIFT_TRY(read_weights(context, std::size(Source::kInputs), &call));
    TensorView y;
    CHAIRLIFT_TRY(context.output(0, {call.num_rows, call.out_features}, &y));
    call.y = y.as<float>();
    return multiply(context, call, {Source::quantize, Source::kChannelNs, rows, CHAIRLIFT_DISPATCH(row_kernels())});
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

void append_linear_ops(OpList& ops) {
  ops.push_back(custom_op<Linear<PlainRows>>());
  ops.push_back(custom_op<Linear<NormRows>>());
  ops.push_back(custom_op<Linear<AddNormRows>>());
  ops.push_back(custom_op<Linear<GatedRows>>());
}

}  // namespace chairlift
