// The entry point that ONNX Runtime calls when the library is registered with session options.
#include <mutex>

#include "ops.h"

#define CHAIRLIFT_EXPORT extern "C" __attribute__((visibility("default")))

CHAIRLIFT_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  using namespace chairlift;
  const void* table = base->GetApi(ort::kApiVersion);
  if (table == nullptr) return nullptr;  // a runtime older than API 18: without a table not even a status can be made
  static std::mutex mutex;               // sessions may be made on several threads
  const std::lock_guard<std::mutex> lock(mutex);
  set_api(table);

  static const OpList ops = [] {
    OpList list;
    append_attention_ops(list);
    append_linear_ops(list);
    append_row_ops(list);
    append_sample_ops(list);
    return list;
  }();
  // The runtime never frees a domain, so all sessions of the process share one.
  static OrtCustomOpDomain* domain = nullptr;
  if (domain == nullptr) {
    OrtCustomOpDomain* created = nullptr;
    using Create = OrtStatus*(const char*, OrtCustomOpDomain**);
    CHAIRLIFT_TRY(ort::at<Create>(table, ort::Slot::CreateCustomOpDomain)("chairlift", &created));
    using Add = OrtStatus*(OrtCustomOpDomain*, const OrtCustomOp*);
    for (const OrtCustomOp* op : ops) CHAIRLIFT_TRY(ort::at<Add>(table, ort::Slot::CustomOpDomain_Add)(created, op));
    domain = created;
  }
  using Append = OrtStatus*(OrtSessionOptions*, OrtCustomOpDomain*);
  return ort::at<Append>(table, ort::Slot::AddCustomOpDomain)(options, domain);
}
