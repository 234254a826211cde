#include "op.h"

#include <cstdarg>
#include <cstdio>
#include <string>

namespace chairlift {
namespace {

const void* g_api = nullptr;

template <class Function>
Function* at(ort::Slot slot) {
  return ort::at<Function>(g_api, slot);
}

// Drops a status that only said "not there". True if there was one.
bool discard(Status status) {
  if (status == nullptr) return false;
  at<void(OrtStatus*)>(ort::Slot::ReleaseStatus)(status);
  return true;
}

std::string shape_text(const int64_t* dims, size_t rank) {
  std::string text = "[";
  for (size_t i = 0; i < rank; ++i) {
    if (i > 0) text += ", ";
    text += dims[i] == kAny ? "any" : std::to_string(dims[i]);
  }
  return text + "]";
}

// Fills type, rank, dims and data of a present tensor.
Status describe(OrtValue* value, TensorView* tensor) {
  using ort::Slot;
  OrtTensorTypeAndShapeInfo* info = nullptr;
  CHAIRLIFT_TRY(
      (at<OrtStatus*(const OrtValue*, OrtTensorTypeAndShapeInfo**)>(Slot::GetTensorTypeAndShape)(value, &info)));
  int type = 0;
  Status status = at<OrtStatus*(const OrtTensorTypeAndShapeInfo*, int*)>(Slot::GetTensorElementType)(info, &type);
  if (!status) {
    status = at<OrtStatus*(const OrtTensorTypeAndShapeInfo*, size_t*)>(Slot::GetDimensionsCount)(info, &tensor->rank);
  }
  if (!status && tensor->rank > kMaxRank) {
    status = error("'%s' has %zu dimensions; at most %zu are supported", tensor->name, tensor->rank, kMaxRank);
  }
  if (!status) {
    status = at<OrtStatus*(const OrtTensorTypeAndShapeInfo*, int64_t*, size_t)>(Slot::GetDimensions)(info, tensor->dims,
                                                                                                     tensor->rank);
  }
  at<void(OrtTensorTypeAndShapeInfo*)>(Slot::ReleaseTensorTypeAndShapeInfo)(info);
  CHAIRLIFT_TRY(status);
  tensor->type = static_cast<ElementType>(type);
  return at<OrtStatus*(OrtValue*, void**)>(Slot::GetTensorMutableData)(value, &tensor->data);
}

}  // namespace

void set_api(const void* api) { g_api = api; }
const void* api() { return g_api; }

Status error(const char* format, ...) {
  char message[512];
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(message, sizeof(message), format, arguments);
  va_end(arguments);
  return at<OrtStatus*(int, const char*)>(ort::Slot::CreateStatus)(ort::kInvalidArgument, message);
}

const char* element_type_name(ElementType type) {
  switch (type) {
    case ElementType::any: return "any";
    case ElementType::float32: return "float32";
    case ElementType::uint8: return "uint8";
    case ElementType::int8: return "int8";
    case ElementType::int32: return "int32";
    case ElementType::int64: return "int64";
    case ElementType::float16: return "float16";
    case ElementType::bfloat16: return "bfloat16";
    case ElementType::float8e4m3fn: return "float8e4m3fn";
  }
  return "another type";
}

int64_t TensorView::num_elements() const {
  int64_t product = is_present ? 1 : 0;
  for (size_t i = 0; i < rank; ++i) product *= dims[i];
  return product;
}

Status expect_rank(const TensorView& tensor, size_t rank) {
  if (tensor.rank == rank) return nullptr;
  return error("'%s' has shape %s, expected %zu dimensions", tensor.name, shape_text(tensor.dims, tensor.rank).c_str(),
               rank);
}

Status expect_shape(const TensorView& tensor, std::initializer_list<int64_t> dims) {
  bool is_equal = tensor.rank == dims.size();
  for (size_t i = 0; is_equal && i < tensor.rank; ++i) {
    const int64_t expected = dims.begin()[i];
    is_equal = expected == kAny || expected == tensor.dims[i];
  }
  if (is_equal) return nullptr;
  return error("'%s' has shape %s, expected %s", tensor.name, shape_text(tensor.dims, tensor.rank).c_str(),
               shape_text(dims.begin(), dims.size()).c_str());
}

Status expect_type(const TensorView& tensor, ElementType type) {
  if (tensor.type == type) return nullptr;
  return error("'%s' is %s, expected %s", tensor.name, element_type_name(tensor.type), element_type_name(type));
}

int64_t Attributes::get(const char* name, int64_t otherwise) const {
  int64_t value = 0;
  using Get = OrtStatus*(const OrtKernelInfo*, const char*, int64_t*);
  return discard(at<Get>(ort::Slot::KernelInfoGetAttribute_int64)(info_, name, &value)) ? otherwise : value;
}

float Attributes::get(const char* name, float otherwise) const {
  float value = 0.0f;
  using Get = OrtStatus*(const OrtKernelInfo*, const char*, float*);
  return discard(at<Get>(ort::Slot::KernelInfoGetAttribute_float)(info_, name, &value)) ? otherwise : value;
}

Status Context::input(size_t index, TensorView* tensor) const {
  const Port& port = inputs_[index];
  *tensor = TensorView{};
  tensor->name = port.name;
  size_t num_inputs = 0;
  CHAIRLIFT_TRY((
      at<OrtStatus*(const OrtKernelContext*, size_t*)>(ort::Slot::KernelContext_GetInputCount)(context_, &num_inputs)));
  const OrtValue* value = nullptr;
  if (index < num_inputs) {
    using Get = OrtStatus*(const OrtKernelContext*, size_t, const OrtValue**);
    CHAIRLIFT_TRY(at<Get>(ort::Slot::KernelContext_GetInput)(context_, index, &value));
  }
  if (value == nullptr) {
    return port.is_optional ? nullptr : error("'%s' is missing", port.name);
  }
  tensor->is_present = true;
  CHAIRLIFT_TRY(describe(const_cast<OrtValue*>(value), tensor));
  return port.type == ElementType::any ? nullptr : expect_type(*tensor, port.type);
}

Status Context::output(size_t index, std::initializer_list<int64_t> dims, TensorView* tensor) {
  const Port& port = outputs_[index];
  *tensor = TensorView{};
  tensor->name = port.name;
  tensor->type = port.type;
  tensor->is_present = true;
  tensor->rank = dims.size();
  std::memcpy(tensor->dims, dims.begin(), dims.size() * sizeof(int64_t));
  OrtValue* value = nullptr;
  using Get = OrtStatus*(OrtKernelContext*, size_t, const int64_t*, size_t, OrtValue**);
  CHAIRLIFT_TRY(at<Get>(ort::Slot::KernelContext_GetOutput)(context_, index, dims.begin(), dims.size(), &value));
  return at<OrtStatus*(OrtValue*, void**)>(ort::Slot::GetTensorMutableData)(value, &tensor->data);
}

Status Context::gpu_stream(void** stream) const {
  using Get = OrtStatus*(const OrtKernelContext*, void**);
  return at<Get>(ort::Slot::KernelContext_GetGPUComputeStream)(context_, stream);
}

Status Context::run_parallel(size_t total, void (*call)(void*, size_t), void* user) {
  // Zero batches: the pool hands out one index at a time, so uneven work balances itself.
  using ParallelFor = OrtStatus*(const OrtKernelContext*, void (*)(void*, size_t), size_t, size_t, void*);
  return at<ParallelFor>(ort::Slot::KernelContext_ParallelFor)(context_, call, total, 0, user);
}

}  // namespace chairlift
