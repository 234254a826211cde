// PagedAttention: rotation, KV write and attention over the block table, one op per layer, for ragged batches.
//
// `kv_cache` is an input that is changed in place. The inputs are checked here, all of them, before anything is
// written: the kernels trust every index.
#include "paged_attention.h"

#include <cmath>
#include <limits>

#include "attention_plan.h"
#include "ops.h"

namespace chairlift {
namespace {

Status read_kv_cache(const TensorView& tensor, AttentionCall* call) {
  int64_t element_bytes = 4;
  int64_t scale_bytes = 0;
  switch (tensor.type) {
    case ElementType::float32: call->kv_type = KvType::float32; break;
    case ElementType::float16:
      call->kv_type = KvType::float16;
      element_bytes = 2;
      break;
    case ElementType::int8:
      call->kv_type = KvType::int8;
      element_bytes = 1;
      scale_bytes = 4;
      break;
    default: return error("'kv_cache' is %s, expected float32, float16 or int8", element_type_name(tensor.type));
  }
  CHAIRLIFT_TRY(expect_shape(tensor, {kAny, 2, call->num_kv_heads, kAny, call->head_dim + scale_bytes}));
  call->num_blocks = tensor.dims[0];
  call->block_size = tensor.dims[3];
  if (call->num_blocks < 1 || call->block_size < 1) {
    return error("'kv_cache' has %lld blocks of %lld tokens", static_cast<long long>(call->num_blocks),
                 static_cast<long long>(call->block_size));
  }
  call->key_group = call->block_size % kKeyGroup == 0 ? kKeyGroup : call->block_size;
  call->token_bytes = call->head_dim * element_bytes;
  call->head_bytes = call->block_size * (call->token_bytes + scale_bytes);
  call->value_bytes = call->num_kv_heads * call->head_bytes;
  call->block_bytes = 2 * call->value_bytes;
  call->kv_cache = tensor.as<uint8_t>();
  return nullptr;
}

Status check_sequence(const AttentionCall& call, int64_t sequence) {
  const int64_t num_queries = static_cast<int64_t>(call.cu_seqlens[sequence + 1]) - call.cu_seqlens[sequence];
  const int64_t context = call.context_lens[sequence];
  const long long shown = sequence;
  if (num_queries < 0) return error("'cu_seqlens' decreases at sequence %lld", shown);
  if (context < num_queries) {
    return error("'context_lens' of sequence %lld is %lld, less than its %lld tokens in this step", shown,
                 static_cast<long long>(context), static_cast<long long>(num_queries));
  }
  if (num_queries == 0) return nullptr;
  const int64_t blocks = (context + call.block_size - 1) / call.block_size;
  if (blocks > call.max_blocks) {
    return error("'block_table' has %lld columns, but sequence %lld needs %lld for its %lld tokens",
                 static_cast<long long>(call.max_blocks), shown, static_cast<long long>(blocks),
                 static_cast<long long>(context));
  }
  for (int64_t i = 0; i < blocks; ++i) {
    const int32_t block = call.block_table[sequence * call.max_blocks + i];
    if (block < 0 || block >= call.num_blocks) {
      return error("'block_table' of sequence %lld holds block %d at %lld; the buffer has %lld blocks", shown, block,
                   static_cast<long long>(i), static_cast<long long>(call.num_blocks));
    }
  }
  return nullptr;
}

Status check_indices(const AttentionCall& call, int64_t max_position) {
  if (call.cu_seqlens[0] != 0) return error("'cu_seqlens' starts at %d, expected 0", call.cu_seqlens[0]);
  for (int64_t sequence = 0; sequence < call.num_seqs; ++sequence) CHAIRLIFT_TRY(check_sequence(call, sequence));
  const int64_t used = call.cu_seqlens[call.num_seqs];
  if (used > call.num_tokens) {
    return error("'cu_seqlens' ends at %lld, but there are %lld tokens", static_cast<long long>(used),
                 static_cast<long long>(call.num_tokens));
  }
  const int64_t num_slots = call.num_blocks * call.block_size;
  for (int64_t token = 0; token < used; ++token) {
    const int32_t slot = call.slot_mapping[token];
    if (slot < -1 || slot >= num_slots) {
      return error("'slot_mapping' of token %lld is %d; the buffer has %lld slots", static_cast<long long>(token), slot,
                   static_cast<long long>(num_slots));
    }
    const int32_t position = call.positions[token];
    if (position < 0 || position >= max_position) {
      return error("'positions' of token %lld is %d; 'cos' and 'sin' have %lld rows", static_cast<long long>(token),
                   position, static_cast<long long>(max_position));
    }
  }
  return nullptr;
}

struct PagedAttention {
  static constexpr const char* kName = "PagedAttention";
  static constexpr Port kInputs[] = {{"qkv", ElementType::float32},          {"kv_cache", ElementType::any},
                                     {"cu_seqlens", ElementType::int32},     {"context_lens", ElementType::int32},
                                     {"block_table", ElementType::int32},    {"slot_mapping", ElementType::int32},
                                     {"positions", ElementType::int32},      {"cos", ElementType::float32},
                                     {"sin", ElementType::float32},          {"workspace", ElementType::float32},
                                     {"q_norm", ElementType::float32, true}, {"k_norm", ElementType::float32, true}};
  static constexpr Port kOutputs[] = {{"out", ElementType::float32}};

  Status init(const Attributes& attributes);
  Status compute(Context& context) const;

 private:
  Status read_tensors(const TensorView (&in)[std::size(kInputs)], AttentionCall* call) const;
  Status run(Context& context, const AttentionCall& call, const TensorView& workspace) const;

  AttentionCall node_{};  // the attributes; everything else is filled per call
};

Status PagedAttention::init(const Attributes& attributes) {
  const int64_t heads = attributes.get("num_heads", int64_t{0});
  const int64_t kv_heads = attributes.get("num_kv_heads", int64_t{0});
  const int64_t dim = attributes.get("head_dim", int64_t{0});
  if (kv_heads < 1 || heads < 1 || heads % kv_heads != 0 || heads > 65536) {
    return error("PagedAttention: 'num_heads' %lld must be a positive multiple of 'num_kv_heads' %lld",
                 static_cast<long long>(heads), static_cast<long long>(kv_heads));
  }
  if (dim < 8 || dim > kMaxHeadDim || dim % 8 != 0) {
    return error("PagedAttention: 'head_dim' is %lld, expected a multiple of 8 up to %d", static_cast<long long>(dim),
                 kMaxHeadDim);
  }
  const float scale = attributes.get("scale", 0.0f);
  node_.num_heads = static_cast<int32_t>(heads);
  node_.num_kv_heads = static_cast<int32_t>(kv_heads);
  node_.group_size = static_cast<int32_t>(heads / kv_heads);
  node_.head_dim = static_cast<int32_t>(dim);
  node_.padded_dim = static_cast<int32_t>((dim + 15) / 16 * 16);
  node_.tile_rows = attention_tile_rows(node_.padded_dim);
  node_.score_scale = (scale != 0.0f ? scale : 1.0f / std::sqrt(static_cast<float>(dim))) * 1.44269504088896341f;
  node_.sliding_window = attributes.get("sliding_window", int64_t{0});
  node_.softcap = attributes.get("softcap", 0.0f);
  node_.norm_epsilon = attributes.get("norm_epsilon", 1e-6f);
  if (node_.sliding_window < 0) return error("PagedAttention: 'sliding_window' is negative");
  if (!(node_.softcap >= 0.0f)) return error("PagedAttention: 'softcap' is negative");
  return nullptr;
}

Status PagedAttention::read_tensors(const TensorView (&in)[std::size(kInputs)], AttentionCall* call) const {
  const int64_t width = static_cast<int64_t>(call->num_heads + 2 * call->num_kv_heads) * call->head_dim;
  CHAIRLIFT_TRY(expect_shape(in[kQkv], {kAny, width}));
  call->num_tokens = in[kQkv].dims[0];
  CHAIRLIFT_TRY(read_kv_cache(in[kKvCache], call));
  CHAIRLIFT_TRY(expect_rank(in[kContextLens], 1));
  call->num_seqs = in[kContextLens].dims[0];
  if (call->num_seqs > std::numeric_limits<int32_t>::max() - 1) return error("'context_lens' has too many sequences");
  CHAIRLIFT_TRY(expect_shape(in[kCuSeqlens], {call->num_seqs + 1}));
  CHAIRLIFT_TRY(expect_shape(in[kBlockTable], {call->num_seqs, kAny}));
  call->max_blocks = in[kBlockTable].dims[1];
  CHAIRLIFT_TRY(expect_shape(in[kSlotMapping], {call->num_tokens}));
  CHAIRLIFT_TRY(expect_shape(in[kPositions], {call->num_tokens}));
  CHAIRLIFT_TRY(expect_rank(in[kCos], 2));
  CHAIRLIFT_TRY(expect_shape(in[kSin], {in[kCos].dims[0], in[kCos].dims[1]}));
  call->rotary_half = in[kCos].dims[1];
  if (2 * call->rotary_half > call->head_dim) {
    return error("'cos' has %lld columns, more than half of head_dim %d", static_cast<long long>(call->rotary_half),
                 call->head_dim);
  }
  CHAIRLIFT_TRY(expect_rank(in[kWorkspace], 1));
  for (AttentionInput norm : {kQNorm, kKNorm}) {
    if (in[norm].is_present) CHAIRLIFT_TRY(expect_shape(in[norm], {call->head_dim}));
  }
  call->qkv = in[kQkv].as<float>();
  call->cu_seqlens = in[kCuSeqlens].as<int32_t>();
  call->context_lens = in[kContextLens].as<int32_t>();
  call->block_table = in[kBlockTable].as<int32_t>();
  call->slot_mapping = in[kSlotMapping].as<int32_t>();
  call->positions = in[kPositions].as<int32_t>();
  call->cos = in[kCos].as<float>();
  call->sin = in[kSin].as<float>();
  call->q_norm = in[kQNorm].as<float>();
  call->k_norm = in[kKNorm].as<float>();
  return check_indices(*call, in[kCos].dims[0]);
}

Status PagedAttention::compute(Context& context) const {
  TensorView in[std::size(kInputs)];
  for (size_t i = 0; i < std::size(kInputs); ++i) CHAIRLIFT_TRY(context.input(i, &in[i]));
  AttentionCall call = node_;
  CHAIRLIFT_TRY(read_tensors(in, &call));
  TensorView out;
  CHAIRLIFT_TRY(context.output(0, {call.num_tokens, static_cast<int64_t>(call.num_heads) * call.head_dim}, &out));
  call.out = out.as<float>();
  return run(context, call, in[kWorkspace]);
}

Status PagedAttention::run(Context& context, const AttentionCall& call, const TensorView& workspace) const {
  if (call.num_tokens == 0) return nullptr;
  const AttentionKernels& kernels = CHAIRLIFT_DISPATCH(attention_kernels());
  static thread_local AttentionPlan plan;  // one per thread that runs sessions
  AttentionPlan& mine = plan;              // the lambdas run on other threads, which have plans of their own
  plan_attention(call, workspace.as<float>(), workspace.num_elements(), &mine);
  CHAIRLIFT_TRY(context.parallel_for(mine.preparations.size(), mine.prepare_ns, [&](size_t index) {
    const AttentionPreparation& tokens = mine.preparations[index];
    for (int64_t i = 0; i < tokens.num_tokens; ++i) {
      for (int32_t head = 0; head < tokens.num_kv_heads; ++head) {
        kernels.prepare(call, tokens.first_token + i, tokens.first_kv_head + head);
      }
    }
  }));
  return context.parallel_for(mine.group_ends.size(), mine.attend_ns, [&](size_t group) {
    const size_t end = mine.group_ends[group];
    for (size_t i = group > 0 ? mine.group_ends[group - 1] : 0; i < end; ++i) {
      const AttentionTask& task = mine.tasks[i];
      const AttentionUnit& unit = mine.units[static_cast<size_t>(task.unit)];
      FollowingTask following{};
      if (i + 1 < end) {
        following.unit = &mine.units[static_cast<size_t>(mine.tasks[i + 1].unit)];
        following.start = task_start(*following.unit, mine.tasks[i + 1]);
      }
      kernels.attend(call, unit, task, i + 1 < end ? &following : nullptr);
      // The last task of a cut unit to finish combines the partials; release and acquire make the others' visible.
      if (unit.num_tasks > 1 && mine.tasks_left[task.unit].fetch_sub(1, std::memory_order_acq_rel) == 1) {
        kernels.fold(call, unit);
      }
    }
  });
}

}  // namespace

void append_attention_ops(OpList& ops) { ops.push_back(custom_op<PagedAttention>()); }

}  // namespace chairlift
