// SampleRows: the next token of every row, by the row's own sampling parameters.
#include <algorithm>
#include <atomic>
#include <limits>

#include "ops.h"
#include "sample_kernel.h"
#include "thread_scratch.h"

namespace chairlift {
namespace {

constexpr double kGreedyNs = 0.1;  // per logit
constexpr double kRandomNs = 0.7;

struct SampleRows {
  static constexpr const char* kName = "SampleRows";
  static constexpr Port kInputs[] = {{"logits", ElementType::float32}, {"temperature", ElementType::float32},
                                     {"top_k", ElementType::int32},    {"top_p", ElementType::float32},
                                     {"min_p", ElementType::float32},  {"seed", ElementType::int64},
                                     {"position", ElementType::int32}};
  static constexpr Port kOutputs[] = {{"token", ElementType::int32}};

  Status init(const Attributes&) { return nullptr; }

  Status compute(Context& context) const {
    TensorView logits;
    CHAIRLIFT_TRY(context.input(0, &logits));
    CHAIRLIFT_TRY(expect_rank(logits, 2));
    const int64_t num_rows = logits.dims[0];
    const int64_t vocab_size = logits.dims[1];
    if (num_rows > 0 && (vocab_size < 1 || vocab_size > std::numeric_limits<int32_t>::max() - 1024)) {
      return error("'logits' has %lld columns; there must be at least 1, and an int32 must hold the last",
                   static_cast<long long>(vocab_size));
    }
    TensorView inputs[std::size(kInputs)];
    for (size_t i = 1; i < std::size(kInputs); ++i) {
      CHAIRLIFT_TRY(context.input(i, &inputs[i]));
      CHAIRLIFT_TRY(expect_shape(inputs[i], {num_rows}));
    }
    const auto row_at = [&](int64_t i) {
      return SampleRow{logits.as<float>() + i * vocab_size,
                       vocab_size,
                       inputs[1].as<float>()[i],
                       inputs[2].as<int32_t>()[i],
                       inputs[3].as<float>()[i],
                       inputs[4].as<float>()[i],
                       static_cast<uint64_t>(inputs[5].as<int64_t>()[i]),
                       static_cast<uint32_t>(inputs[6].as<int32_t>()[i])};
    };
    int64_t num_random = 0;
    for (int64_t i = 0; i < num_rows; ++i) {
      const SampleRow row = row_at(i);
      CHAIRLIFT_TRY(check(row, i));
      num_random += row.temperature > 0.0f;
    }
    TensorView token;
    CHAIRLIFT_TRY(context.output(0, {num_rows}, &token));

    const SampleKernels& kernels = CHAIRLIFT_DISPATCH(sample_kernels());
    const double logit_ns = kGreedyNs * static_cast<double>(num_rows) + kRandomNs * static_cast<double>(num_random);
    const int64_t work_ns = static_cast<int64_t>(logit_ns * static_cast<double>(vocab_size));
    std::atomic<bool> is_out_of_memory{false};
    CHAIRLIFT_TRY(context.parallel_for(static_cast<size_t>(num_rows), work_ns, [&](size_t i) {
      void* scratch = thread_scratch(Scratch::task, kernels.scratch_bytes(vocab_size));
      if (scratch == nullptr) {
        is_out_of_memory.store(true, std::memory_order_relaxed);
        return;
      }
      token.as<int32_t>()[i] = kernels.sample(row_at(static_cast<int64_t>(i)), scratch);
    }));
    if (is_out_of_memory) return error("no memory to sample from %lld logits", static_cast<long long>(vocab_size));
    return check_tokens(token, num_rows);
  }

 private:
  static Status check(const SampleRow& row, int64_t i) {
    const long long index = static_cast<long long>(i);
    if (!(row.temperature >= 0.0f && row.temperature <= std::numeric_limits<float>::max())) {
      return error("'temperature' row %lld is %g; it must be finite and not negative", index,
                   static_cast<double>(row.temperature));
    }
    if (row.temperature == 0.0f) return nullptr;
    if (!(row.top_p >= 0.0f && row.top_p <= 1.0f)) {
      return error("'top_p' row %lld is %g; it must be within 0 and 1", index, static_cast<double>(row.top_p));
    }
    if (!(row.min_p >= 0.0f && row.min_p <= 1.0f)) {
      return error("'min_p' row %lld is %g; it must be within 0 and 1", index, static_cast<double>(row.min_p));
    }
    return nullptr;
  }

  static Status check_tokens(const TensorView& token, int64_t num_rows) {
    const int32_t* tokens = token.as<int32_t>();
    const int32_t* unusable = std::find(tokens, tokens + num_rows, kNoUsableLogit);
    if (unusable == tokens + num_rows) return nullptr;
    return error("'logits' row %lld holds NaN or +inf, or nothing but -inf", static_cast<long long>(unusable - tokens));
  }
};

}  // namespace

void append_sample_ops(OpList& ops) { ops.push_back(custom_op<SampleRows>()); }

}  // namespace chairlift
