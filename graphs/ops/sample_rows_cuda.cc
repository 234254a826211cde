// SampleRows for the CUDA provider: the op of sample_rows.cc as launches of the kernels of cuda/sample_rows.cu, one behind
// the other, over logits of the model's type.
//
// It does more than the CPU's: rows are edited before, and log-probabilities reported, as buffers say that the executor
// fills (cuda_launch.h). Logits of edited rows are changed in place. Nothing on the device is looked at here, so unlike
// the CPU kernel this one checks shapes alone; a row that cannot be sampled from gets the token -1.
#include <algorithm>
#include <limits>

#include "cuda_launch.h"
#include "ops.h"

namespace chairlift {
namespace {

// A block of sample_scan and sample_count takes from one to four slices of a row, of 8 logits a thread: in small batches
// one, so that there are many blocks, in large ones more, which cost less than as many blocks.
constexpr int64_t kLogitsPerThread = 8;
constexpr int64_t kMaxSlices = 4;

template <ElementType kLogit>
struct SampleRowsCuda {
  static constexpr const char* kName = "SampleRows";
  static constexpr const char* kProvider = "CUDAExecutionProvider";
  static constexpr Port kInputs[] = {{"logits", kLogit},
                                     {"temperature", ElementType::float32},
                                     {"top_k", ElementType::int32},
                                     {"top_p", ElementType::float32},
                                     {"min_p", ElementType::float32},
                                     {"seed", ElementType::int64},
                                     {"position", ElementType::int32}};
  static constexpr Port kOutputs[] = {{"token", ElementType::int32}};

  Status init(const Attributes&) { return nullptr; }
  Status compute(Context& context) const;
};

// The same on the CPU provider, for tests: device memory is host memory, and the launch function a simulator's.
template <ElementType kLogit>
struct SimulatedSampleRowsCuda : SampleRowsCuda<kLogit> {
  static constexpr const char* kProvider = nullptr;
};

template <ElementType kLogit>
Status SampleRowsCuda<kLogit>::compute(Context& context) const {
  const CudaStep* step = cuda_step();
  if (step == nullptr) return error("SampleRows: no CUDA kernels were given");
  if (step->scalar_type != static_cast<int32_t>(kLogit)) {
    return error("the kernels were compiled for %s, the logits are %s",
                 element_type_name(static_cast<ElementType>(step->scalar_type)), element_type_name(kLogit));
  }
  TensorView in[std::size(kInputs)];
  for (size_t i = 0; i < std::size(kInputs); ++i) CHAIRLIFT_TRY(context.input(i, &in[i]));
  CHAIRLIFT_TRY(expect_rank(in[0], 2));
  const int64_t num_rows = in[0].dims[0];
  const int64_t vocab_size = in[0].dims[1];
  for (size_t i = 1; i < std::size(kInputs); ++i) CHAIRLIFT_TRY(expect_shape(in[i], {num_rows}));
  TensorView token;
  CHAIRLIFT_TRY(context.output(0, {num_rows}, &token));
  if (num_rows == 0) return nullptr;
  if (vocab_size < 1 || vocab_size > std::numeric_limits<int32_t>::max() - 4096) {
    return error("'logits' has %lld columns; there must be at least 1, and an int32 must hold the last",
                 static_cast<long long>(vocab_size));
  }
  void* stream = nullptr;
  CHAIRLIFT_TRY(context.gpu_stream(&stream));
  const int32_t* const no_mask_rows = nullptr;
  const uint32_t* const no_masks = nullptr;
  const auto launch = [&](const char* name, const CudaKernel& kernel, int64_t grid_x, int64_t grid_y) {
    return cuda_launch(*step, name, kernel, grid_x, grid_y, stream, in[0].data, in[1].data, in[2].data, in[3].data,
                       in[4].data, in[5].data, in[6].data, step->penalties, step->edit_indptr, step->edit_tokens,
                       step->edit_counts, step->edit_biases, step->edit_logits, no_mask_rows, no_masks,
                       step->num_logprobs, token.data, step->logprob, step->top_tokens, step->top_logprobs,
                       step->sample_workspace, static_cast<int32_t>(vocab_size), step->max_top);
  };
  const int64_t slice = kLogitsPerThread * step->sample_scan.block_threads;
  const int64_t num_slices = (vocab_size + slice - 1) / slice;
  const int64_t num_blocks = std::max(step->sample_blocks, 1);
  const int64_t slices_each = std::clamp((num_rows * num_slices + num_blocks - 1) / num_blocks, int64_t{1}, kMaxSlices);
  const int64_t num_parts = (num_slices + slices_each - 1) / slices_each;
  // Rows in x: y ends at 65,535.
  CHAIRLIFT_TRY(launch("sample_scan", step->sample_scan, num_rows, num_parts));
  CHAIRLIFT_TRY(launch("sample_count", step->sample_count, num_rows, num_parts));
  return launch("sample_draw", step->sample_draw, num_rows, 1);
}

}  // namespace

void append_sample_cuda_ops(OpList& ops) {
  ops.push_back(custom_op<SampleRowsCuda<ElementType::float16>>());
  ops.push_back(custom_op<SampleRowsCuda<ElementType::bfloat16>>());
}

void append_simulated_sample_ops(OpList& ops) {
  ops.push_back(custom_op<SimulatedSampleRowsCuda<ElementType::float16>>());
  ops.push_back(custom_op<SimulatedSampleRowsCuda<ElementType::bfloat16>>());
}

}  // namespace chairlift
