// The parts of ONNX Runtime's C ABI that this library uses, declared by hand: no package ships the headers.
//
// The ABI is append-only. The API is a table of function pointers; `Slot` holds the positions of those we call, valid
// for API version 18 and later. `OrtCustomOp` is the structure that describes one op to the runtime.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {
struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtValue;
struct OrtTensorTypeAndShapeInfo;
struct OrtShapeInferContext;

struct OrtApiBase {
  const void* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const void* api, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  int (*GetInputType)(const OrtCustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  int (*GetOutputType)(const OrtCustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void* kernel, OrtKernelContext*);
  void (*KernelDestroy)(void* kernel);
  int (*GetInputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetOutputCharacteristic)(const OrtCustomOp*, size_t index);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const void* api, const OrtKernelInfo*, void** kernel);
  OrtStatus* (*KernelComputeV2)(void* kernel, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int** input, int** output);
  void (*ReleaseMayInplace)(int* input, int* output);
  size_t (*GetAliasMap)(int** input, int** output);
  void (*ReleaseAliasMap)(int* input, int* output);
};
}

namespace chairlift::ort {

constexpr uint32_t kApiVersion = 18;

// Status codes and flags of the C API.
constexpr int kInvalidArgument = 2;
constexpr int kRequired = 0;
constexpr int kOptional = 1;
constexpr int kMemoryOnHost = -2;
constexpr int kMemoryDefault = 0;

enum class Slot : size_t {
  CreateStatus = 0,
  CreateCustomOpDomain = 26,
  CustomOpDomain_Add = 27,
  AddCustomOpDomain = 28,
  GetTensorMutableData = 51,
  GetTensorElementType = 60,
  GetDimensionsCount = 61,
  GetDimensions = 62,
  GetTensorTypeAndShape = 65,
  KernelInfoGetAttribute_float = 85,
  KernelInfoGetAttribute_int64 = 86,
  KernelContext_GetInputCount = 88,
  KernelContext_GetInput = 90,
  KernelContext_GetOutput = 91,
  ReleaseStatus = 93,
  ReleaseTensorTypeAndShapeInfo = 99,
  KernelContext_GetGPUComputeStream = 193,
  KernelContext_ParallelFor = 274,
};

// The function pointer in a slot. `Function` is its signature, for example `OrtStatus*(const char*)`.
template <class Function>
inline Function* at(const void* api, Slot slot) {
  return reinterpret_cast<Function*>(
      const_cast<void*>(static_cast<const void* const*>(api)[static_cast<size_t>(slot)]));
}

}  // namespace chairlift::ort
