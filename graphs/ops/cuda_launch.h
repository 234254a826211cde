// Launching CUDA kernels without CUDA: through one function pointer of cuLaunchKernel's form, which is the driver's own
// on a GPU and a simulator's in tests. Whoever owns the kernels and the step's plan says what to launch (`CudaStep`);
// the ops add addresses and shapes of their tensors, and neither allocate, synchronise nor copy.
#pragma once

#include <cstdint>

#include "op.h"

namespace chairlift {

// cuLaunchKernel: a function, its grid, its block, dynamic shared bytes, a stream, argument addresses, no extras.
// 0: done.
using CudaLaunch = int (*)(void* function, uint32_t grid_x, uint32_t grid_y, uint32_t grid_z, uint32_t block_x,
                           uint32_t block_y, uint32_t block_z, uint32_t shared_bytes, void* stream, void** arguments,
                           void** extra);

// A loaded kernel, with what it needs whatever the step.
struct CudaKernel {
  void* function;  // CUfunction
  uint32_t block_threads;
  uint32_t shared_bytes;
};

// What the CUDA ops of one model launch in one kind of step. Plain C, filled by the executor; pointers below `launch`
// are to device memory. While a CUDA graph is captured, everything here must depend on its batch size alone.
struct CudaStep {
  uint32_t struct_bytes;  // sizeof(CudaStep), and kCudaStepLayout: whoever fills it was made for this library
  uint32_t layout;
  CudaLaunch launch;
  CudaKernel rope_kv_write;
  CudaKernel attn_decode;
  CudaKernel attn_prefill;
  CudaKernel attn_combine;
  CudaKernel sample_scan;
  CudaKernel sample_count;
  CudaKernel sample_draw;
  // The plan of attention, as service/executor/cuda/plan_layout.py describes it.
  const int32_t* range_begin;        // [num_ranges + 1]
  const int32_t* num_merges;         // [1]
  const int32_t* merges;             // [_, 8]
  const int32_t* decode_items;       // [_, 8]
  const int32_t* num_prefill_items;  // [1]
  const int32_t* prefill_items;      // [_, 8]
  // Of SampleRows, by rows of logits: what cuda/README.md calls the same.
  const float* penalties;       // [num_rows, 3]
  const int32_t* edit_indptr;   // [num_rows + 1]
  const int32_t* edit_tokens;   // [_]
  const int32_t* edit_counts;   // [_]
  const float* edit_biases;     // [_]
  float* edit_logits;           // [_]
  const int32_t* num_logprobs;  // [num_rows]
  float* logprob;               // [num_rows]
  int32_t* top_tokens;          // [num_rows, max_top]
  float* top_logprobs;          // [num_rows, max_top]
  uint32_t* sample_workspace;   // [_]
  int32_t num_ranges;                // blocks of attn_decode per kv head; 0: the step decodes nothing
  int32_t num_slots;                 // partial results of 16 rows that the workspace holds
  int32_t prefill_blocks;            // blocks of attn_prefill per kv head, at least the plan's items; 0: none
  int32_t merge_blocks;              // blocks of attn_combine per kv head, at least the plan's merges; 0: none
  int32_t scalar_type;               // the model's ElementType that the kernels were compiled for
  int32_t kv_type;                   // as well: scalar_type, or float8e4m3fn
  int32_t head_dim;                  // as well
  int32_t block_size;                // as well
  int32_t max_top;
  int32_t sample_blocks;             // of sample_scan, that the slices of all rows are shared out to
};

// CRC-32 of a line for each field of CudaKernel and then of CudaStep, "name bytes". CudaStep.layout_number() of
// service/executor/cuda/launch.py makes it of its own fields, so this follows whenever one changes.
constexpr uint32_t kCudaStepLayout = 0xfb820d1b;

// The step that ops launch from now on; null when none was given. One thread runs CUDA steps.
const CudaStep* cuda_step();

// Launches `kernel` on a grid of (grid_x, grid_y) blocks. Arguments are passed as the types they have here: pointers,
// int32_t and float.
template <class... Arguments>
Status cuda_launch(const CudaStep& step, const char* name, const CudaKernel& kernel, int64_t grid_x, int64_t grid_y,
                   void* stream, Arguments... arguments) {
  static_assert(((std::is_pointer_v<Arguments> || std::is_same_v<Arguments, int32_t> ||
                  std::is_same_v<Arguments, float>)&&...),
                "kernels take pointers, int32 and float");
  void* addresses[] = {static_cast<void*>(&arguments)...};
  const int result = step.launch(kernel.function, static_cast<uint32_t>(grid_x), static_cast<uint32_t>(grid_y), 1,
                                 kernel.block_threads, 1, 1, kernel.shared_bytes, stream, addresses, nullptr);
  return result == 0 ? nullptr : error("%s cannot be launched: CUDA error %d", name, result);
}

}  // namespace chairlift
