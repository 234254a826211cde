// The entry point that ONNX Runtime calls when the library is registered with session options.
#include <mutex>

#include "ops.h"

#define CHAIRLIFT_EXPORT extern "C" __attribute__((visibility("default")))

namespace chairlift {
namespace {

// A domain of the ops that `append` yields. The runtime never frees one, so all sessions of the process share it.
template <class Append>
Status make_domain(const void* table, const char* name, const Append& append, OrtCustomOpDomain** domain) {
  if (*domain != nullptr) return nullptr;
  OrtCustomOpDomain* created = nullptr;
  using Create = OrtStatus*(const char*, OrtCustomOpDomain**);
  CHAIRLIFT_TRY(ort::at<Create>(table, ort::Slot::CreateCustomOpDomain)(name, &created));
  OpList ops;
  append(ops);
  using Add = OrtStatus*(OrtCustomOpDomain*, const OrtCustomOp*);
  for (const OrtCustomOp* op : ops) CHAIRLIFT_TRY(ort::at<Add>(table, ort::Slot::CustomOpDomain_Add)(created, op));
  *domain = created;
  return nullptr;
}

void append_all_ops(OpList& ops) {
  append_attention_ops(ops);
  append_attention_cuda_ops(ops);
  append_linear_ops(ops);
  append_sample_ops(ops);
  append_sample_cuda_ops(ops);
}

void append_simulated_ops(OpList& ops) {
  append_simulated_attention_ops(ops);
  append_simulated_sample_ops(ops);
}

}  // namespace
}  // namespace chairlift

CHAIRLIFT_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace chairlift;
  const void* table = base->GetApi(ort::kApiVersion);
  if (table == nullptr) return nullptr;  // a runtime older than API 18: without a table not even a status can be made
  static std::mutex mutex;               // sessions may be made on several threads
  const std::lock_guard<std::mutex> lock(mutex);
  set_api(table);

  static OrtCustomOpDomain* domain = nullptr;
  static OrtCustomOpDomain* simulated = nullptr;
  CHAIRLIFT_TRY(make_domain(table, "chairlift", append_all_ops, &domain));
  CHAIRLIFT_TRY(make_domain(table, "chairlift.simulated", append_simulated_ops, &simulated));
  using Append = OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*);
  CHAIRLIFT_TRY(ort::at<Append>(table, ort::Slot::AddCustomOpDomain)(options, domain));
  return ort::at<Append>(table, ort::Slot::AddCustomOpDomain)(options, simulated);
}
