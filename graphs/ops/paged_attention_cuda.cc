// PagedAttention for the CUDA provider: the op of paged_attention.cc as four kernel launches (cuda/README.md).
//
//   rope_kv_write   rotated queries into `out`, keys and values into their slots
//   attn_decode     few rows a sequence: `out`, or partial results in `workspace`
//   attn_prefill    chunks of prompts: the same
//   attn_combine    merges partial results
//
// Which part each block computes is data that the executor planned (cuda_launch.h). Lengths, slots and the block table
// lie on the device and are not looked at here, so unlike the CPU kernel this one checks shapes and types only.
#include <cmath>

#include "cuda_launch.h"
#include "ops.h"
#include "paged_attention.h"

namespace chairlift {
namespace {

constexpr int64_t kMaxHeads = 65536;
constexpr int64_t kDecodeRows = 16;  // packed rows of an item: query heads of a group times tokens

// Attributes, and extents of a call.
struct CudaAttentionCall {
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t group_size;
  int32_t head_dim;
  int32_t sliding_window;
  float score_scale;  // scale * log2(e)
  float softcap;      // soft cap * log2(e); 0: none
  float norm_epsilon;

  int64_t num_tokens;
  int64_t num_seqs;
  int32_t table_stride;
  int32_t rotary_half;
};

template <ElementType kScalar>
struct PagedAttentionCuda {
  static constexpr const char* kName = "PagedAttention";
  static constexpr const char* kProvider = "CUDAExecutionProvider";
  static constexpr Port kInputs[] = {{"qkv", kScalar},
                                     {"kv_cache", ElementType::any},
                                     {"cu_seqlens", ElementType::int32},
                                     {"context_lens", ElementType::int32},
                                     {"block_table", ElementType::int32},
                                     {"slot_mapping", ElementType::int32},
                                     {"positions", ElementType::int32},
                                     {"cos", ElementType::float32},
                                     {"sin", ElementType::float32},
                                     {"workspace", ElementType::float32},
                                     {"q_norm", ElementType::float32, true},
                                     {"k_norm", ElementType::float32, true}};
  static constexpr Port kOutputs[] = {{"out", kScalar}};

  Status init(const Attributes& attributes);
  Status compute(Context& context) const;

 private:
  using Tensors = TensorView[std::size(kInputs)];

  Status read_shapes(const Tensors& in, const CudaStep& step, CudaAttentionCall* call) const;
  Status run(const Tensors& in, const CudaAttentionCall& call, const CudaStep& step, void* out, void* stream) const;

  CudaAttentionCall node_{};  // the attributes; the rest is filled per call
};

// The same on the CPU provider, for tests: device memory is host memory, and the launch function a simulator's.
template <ElementType kScalar>
struct SimulatedPagedAttentionCuda : PagedAttentionCuda<kScalar> {
  static constexpr const char* kProvider = nullptr;
};

template <ElementType kScalar>
Status PagedAttentionCuda<kScalar>::init(const Attributes& attributes) {
  const int64_t heads = attributes.get("num_heads", int64_t{0});
  const int64_t kv_heads = attributes.get("num_kv_heads", int64_t{0});
  const int64_t dim = attributes.get("head_dim", int64_t{0});
  const int64_t window = attributes.get("sliding_window", int64_t{0});
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0 || heads / kv_heads > kDecodeRows) {
    return error("PagedAttention: 'num_heads' %lld must be 1 to %lld times 'num_kv_heads' %lld",
                 static_cast<long long>(heads), static_cast<long long>(kDecodeRows), static_cast<long long>(kv_heads));
  }
  if (heads > kMaxHeads) {
    return error("PagedAttention: 'num_heads' %lld is more than %lld", static_cast<long long>(heads),
                 static_cast<long long>(kMaxHeads));
  }
  if (dim < 8 || dim > kMaxHeadDim || dim % 8 != 0) {
    return error("PagedAttention: 'head_dim' is %lld, expected a multiple of 8 up to %d", static_cast<long long>(dim),
                 kMaxHeadDim);
  }
  if (window < 0 || window > INT32_MAX) return error("PagedAttention: 'sliding_window' is outside int32");
  constexpr float kLog2E = 1.44269504088896341f;
  const float scale = attributes.get("scale", 0.0f);
  node_.num_heads = static_cast<int32_t>(heads);
  node_.num_kv_heads = static_cast<int32_t>(kv_heads);
  node_.group_size = static_cast<int32_t>(heads / kv_heads);
  node_.head_dim = static_cast<int32_t>(dim);
  node_.sliding_window = static_cast<int32_t>(window);
  node_.score_scale = (scale != 0.0f ? scale : 1.0f / std::sqrt(static_cast<float>(dim))) * kLog2E;
  node_.softcap = attributes.get("softcap", 0.0f) * kLog2E;
  node_.norm_epsilon = attributes.get("norm_epsilon", 1e-6f);
  if (!(node_.softcap >= 0.0f)) return error("PagedAttention: 'softcap' is negative");
  return nullptr;
}

template <ElementType kScalar>
Status PagedAttentionCuda<kScalar>::read_shapes(const Tensors& in, const CudaStep& step,
                                                CudaAttentionCall* call) const {
  if (step.scalar_type != static_cast<int32_t>(kScalar) || step.head_dim != call->head_dim) {
    return error("the kernels were compiled for %s and head_dim %d, the graph has %s and %d",
                 element_type_name(static_cast<ElementType>(step.scalar_type)), step.head_dim,
                 element_type_name(kScalar), call->head_dim);
  }
  const int64_t width = static_cast<int64_t>(call->num_heads + 2 * call->num_kv_heads) * call->head_dim;
  CHAIRLIFT_TRY(expect_shape(in[kQkv], {kAny, width}));
  call->num_tokens = in[kQkv].dims[0];
  CHAIRLIFT_TRY(expect_type(in[kKvCache], static_cast<ElementType>(step.kv_type)));
  CHAIRLIFT_TRY(expect_shape(in[kKvCache], {kAny, 2, call->num_kv_heads, step.block_size, call->head_dim}));
  CHAIRLIFT_TRY(expect_rank(in[kContextLens], 1));
  call->num_seqs = in[kContextLens].dims[0];
  CHAIRLIFT_TRY(expect_shape(in[kCuSeqlens], {call->num_seqs + 1}));
  CHAIRLIFT_TRY(expect_shape(in[kBlockTable], {call->num_seqs, kAny}));
  call->table_stride = static_cast<int32_t>(in[kBlockTable].dims[1]);
  CHAIRLIFT_TRY(expect_shape(in[kSlotMapping], {call->num_tokens}));
  CHAIRLIFT_TRY(expect_shape(in[kPositions], {call->num_tokens}));
  CHAIRLIFT_TRY(expect_rank(in[kCos], 2));
  CHAIRLIFT_TRY(expect_shape(in[kSin], {in[kCos].dims[0], in[kCos].dims[1]}));
  if (2 * in[kCos].dims[1] > call->head_dim) {
    return error("'cos' has %lld columns, more than half of head_dim %d", static_cast<long long>(in[kCos].dims[1]),
                 call->head_dim);
  }
  call->rotary_half = static_cast<int32_t>(in[kCos].dims[1]);
  for (AttentionInput norm : {kQNorm, kKNorm}) {
    if (in[norm].is_present) CHAIRLIFT_TRY(expect_shape(in[norm], {call->head_dim}));
  }
  const int64_t num_floats = int64_t{step.num_slots} * call->num_kv_heads * kDecodeRows * (call->head_dim + 1);
  CHAIRLIFT_TRY(expect_rank(in[kWorkspace], 1));
  if (step.merge_blocks > 0 && in[kWorkspace].dims[0] < num_floats) {
    return error("'workspace' has %lld elements, %d partial results take %lld",
                 static_cast<long long>(in[kWorkspace].dims[0]), step.num_slots, static_cast<long long>(num_floats));
  }
  return nullptr;
}

template <ElementType kScalar>
Status PagedAttentionCuda<kScalar>::compute(Context& context) const {
  const CudaStep* step = cuda_step();
  if (step == nullptr) return error("PagedAttention: no CUDA kernels were given");
  Tensors in;
  for (size_t i = 0; i < std::size(kInputs); ++i) CHAIRLIFT_TRY(context.input(i, &in[i]));
  CudaAttentionCall call = node_;
  CHAIRLIFT_TRY(read_shapes(in, *step, &call));
  TensorView out;
  CHAIRLIFT_TRY(context.output(0, {call.num_tokens, static_cast<int64_t>(call.num_heads) * call.head_dim}, &out));
  if (call.num_tokens == 0) return nullptr;
  void* stream = nullptr;
  CHAIRLIFT_TRY(context.gpu_stream(&stream));
  return run(in, call, *step, out.data, stream);
}

template <ElementType kScalar>
Status PagedAttentionCuda<kScalar>::run(const Tensors& in, const CudaAttentionCall& call, const CudaStep& step,
                                        void* out, void* stream) const {
  constexpr int64_t kHeadsPerBlock = 4;  // a warp each
  constexpr float kNoScale = 1.0f;       // K and V are stored as they are, in whichever type
  void* const kv = in[kKvCache].data;
  const int32_t heads = call.num_heads + 2 * call.num_kv_heads;
  CHAIRLIFT_TRY(cuda_launch(step, "rope_kv_write", step.rope_kv_write, call.num_tokens,
                            (heads + kHeadsPerBlock - 1) / kHeadsPerBlock, stream, in[kQkv].data, in[kPositions].data,
                            in[kSlotMapping].data, in[kCos].data, in[kSin].data, in[kQNorm].data, in[kKNorm].data, out,
                            kv, call.num_heads, call.num_kv_heads, call.rotary_half, call.norm_epsilon, kNoScale,
                            kNoScale));
  // The queries lie in `out` already: a block reads its rows before it writes them.
  float* const part = in[kWorkspace].template as<float>();
  float* const lse = part + int64_t{step.num_slots} * call.num_kv_heads * kDecodeRows * call.head_dim;
  const auto attend = [&](const char* name, const CudaKernel& kernel, int32_t grid_x, int32_t grid_y,
                          const int32_t* items, const int32_t* indptr) {
    return cuda_launch(step, name, kernel, grid_x, grid_y, stream, out, kv, in[kBlockTable].data, items,
                       indptr, out, part, lse, call.table_stride, call.num_kv_heads, call.group_size,
                       call.sliding_window, call.score_scale, call.softcap, kNoScale);
  };
  if (step.num_ranges > 0) {
    CHAIRLIFT_TRY(attend("attn_decode", step.attn_decode, step.num_ranges, call.num_kv_heads, step.decode_items,
                         step.range_begin));
  }
  if (step.prefill_blocks > 0) {
    CHAIRLIFT_TRY(attend("attn_prefill", step.attn_prefill, call.num_kv_heads, step.prefill_blocks, step.prefill_items,
                         step.num_prefill_items));
  }
  if (step.merge_blocks > 0) {
    CHAIRLIFT_TRY(cuda_launch(step, "attn_combine", step.attn_combine, step.merge_blocks, call.num_kv_heads, stream,
                              part, lse, step.merges, step.num_merges, out, call.num_kv_heads, call.group_size));
  }
  return nullptr;
}

}  // namespace

void append_attention_cuda_ops(OpList& ops) {
  ops.push_back(custom_op<PagedAttentionCuda<ElementType::float16>>());
  ops.push_back(custom_op<PagedAttentionCuda<ElementType::bfloat16>>());
}

void append_simulated_attention_ops(OpList& ops) {
  ops.push_back(custom_op<SimulatedPagedAttentionCuda<ElementType::float16>>());
  ops.push_back(custom_op<SimulatedPagedAttentionCuda<ElementType::bfloat16>>());
}

}  // namespace chairlift
