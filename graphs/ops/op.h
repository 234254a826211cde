// A thin typed layer over the C ABI. A new op is a struct with a name, its ports, `init` and `compute`:
//
//   struct Double {
//     static constexpr const char* kName = "Double";
//     static constexpr Port kInputs[] = {{"x", ElementType::float32}};
//     static constexpr Port kOutputs[] = {{"y", ElementType::float32}};
//     Status init(const Attributes&) { return nullptr; }
//     Status compute(Context& context) const {
//       TensorView x, y;
//       CHAIRLIFT_TRY(context.input(0, &x));
//       CHAIRLIFT_TRY(expect_shape(x, {kAny, kAny}));
//       CHAIRLIFT_TRY(context.output(0, {x.dims[0], x.dims[1]}, &y));
//       ...
//     }
//   };
//   void append_double_ops(OpList& ops) { ops.push_back(custom_op<Double>()); }
//
// Every call that can fail returns a Status. Nothing here throws; what an op throws becomes a Status.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <memory>
#include <type_traits>
#include <vector>

#include "ort_abi.h"

namespace chairlift {

// Null means success. A failed status is owned by whoever receives it: return it to the runtime or release it.
using Status = OrtStatus*;
using OpList = std::vector<const OrtCustomOp*>;

#define CHAIRLIFT_TRY(expression)                                                       \
  do {                                                                                  \
    if (::chairlift::Status chairlift_status_ = (expression)) return chairlift_status_; \
  } while (false)

// The API table; set once by RegisterCustomOps, before any op exists.
void set_api(const void* api);
const void* api();

// An invalid-argument status with a printf-style message of at most 511 bytes.
[[gnu::format(printf, 1, 2)]] Status error(const char* format, ...);

// ONNX element types. `any` in a port accepts every tensor; the op checks by itself.
enum class ElementType : int {
  any = 0,
  float32 = 1,
  uint8 = 2,
  int8 = 3,
  int32 = 6,
  int64 = 7,
  float16 = 10,
  bfloat16 = 16,
  float8e4m3fn = 17
};
const char* element_type_name(ElementType type);

// One input or output of an op.
struct Port {
  const char* name;
  ElementType type;
  bool is_optional = false;
  bool is_on_host = false;  // only says something for kernels of other execution providers
};

constexpr size_t kMaxRank = 8;
constexpr int64_t kAny = -1;  // in an expected shape: any extent

// A tensor's memory, element type and shape. An absent optional input has `data == nullptr` and rank 0.
struct TensorView {
  const char* name = "";
  ElementType type = ElementType::any;
  bool is_present = false;
  size_t rank = 0;
  int64_t dims[kMaxRank] = {};
  void* data = nullptr;

  int64_t num_elements() const;
  template <class T>
  T* as() const {
    return static_cast<T*>(data);
  }
};

// Null if the tensor has this shape (kAny matches every extent), else a status that names it and both shapes.
Status expect_shape(const TensorView& tensor, std::initializer_list<int64_t> dims);
Status expect_rank(const TensorView& tensor, size_t rank);
Status expect_type(const TensorView& tensor, ElementType type);

// The attributes of a node. A missing attribute yields the default.
class Attributes {
 public:
  explicit Attributes(const OrtKernelInfo* info) : info_(info) {}
  int64_t get(const char* name, int64_t otherwise) const;
  float get(const char* name, float otherwise) const;

 private:
  const OrtKernelInfo* info_;
};

// Fork and join of the runtime's thread pool costs 2 us while its threads spin, 10 to 15 us when they sleep: less work
// than this runs inline.
constexpr int64_t kInlineNs = 3'000;

// One call of a kernel. Valid during `compute` only.
class Context {
 public:
  Context(OrtKernelContext* context, const Port* inputs, const Port* outputs)
      : context_(context), inputs_(inputs), outputs_(outputs) {}

  // Input `index` as declared. Fails on a wrong element type, more than kMaxRank dimensions or a missing required
  // input; an absent optional input succeeds with `is_present == false`.
  Status input(size_t index, TensorView* tensor) const;

  // Creates output `index` with this shape; `tensor->data` is its memory (null when the shape has no elements).
  Status output(size_t index, std::initializer_list<int64_t> dims, TensorView* tensor);

  // The stream that the provider computes on; null for the CPU provider.
  Status gpu_stream(void** stream) const;

  // Calls `body(i)` for every i in [0, total), in any order, on the runtime's threads; all inline when the whole is
  // estimated at less than kInlineNs. `body` must not throw and must not depend on which thread runs it.
  template <class Body>
  Status parallel_for(size_t total, int64_t estimated_ns, const Body& body) {
    if (total <= 1 || estimated_ns < kInlineNs) {
      for (size_t i = 0; i < total; ++i) body(i);
      return nullptr;
    }
    auto call = [](void* user, size_t i) { (*static_cast<const Body*>(user))(i); };
    return run_parallel(total, call, const_cast<void*>(static_cast<const void*>(&body)));
  }

 private:
  Status run_parallel(size_t total, void (*call)(void*, size_t), void* user);

  OrtKernelContext* context_;
  const Port* inputs_;
  const Port* outputs_;
};

namespace detail {

// The execution provider that an op names as `kProvider`; null, for CPU, where it names none.
template <class Kernel, class = void>
struct ProviderOf {
  static constexpr const char* kName = nullptr;
};
template <class Kernel>
struct ProviderOf<Kernel, std::void_t<decltype(Kernel::kProvider)>> {
  static constexpr const char* kName = Kernel::kProvider;
};

// Adapts the op struct `Kernel` to the C ABI; one static object per op.
template <class Kernel>
struct CustomOp : OrtCustomOp {
  CustomOp() : OrtCustomOp{} {
    version = ort::kApiVersion;
    GetName = [](const OrtCustomOp*) -> const char* { return Kernel::kName; };
    GetExecutionProviderType = [](const OrtCustomOp*) -> const char* { return ProviderOf<Kernel>::kName; };
    GetInputTypeCount = [](const OrtCustomOp*) { return std::size(Kernel::kInputs); };
    GetOutputTypeCount = [](const OrtCustomOp*) { return std::size(Kernel::kOutputs); };
    GetInputType = [](const OrtCustomOp*, size_t i) { return static_cast<int>(Kernel::kInputs[i].type); };
    GetOutputType = [](const OrtCustomOp*, size_t i) { return static_cast<int>(Kernel::kOutputs[i].type); };
    GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
      return Kernel::kInputs[i].is_optional ? ort::kOptional : ort::kRequired;
    };
    GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return ort::kRequired; };
    GetInputMemoryType = [](const OrtCustomOp*, size_t i) {
      return Kernel::kInputs[i].is_on_host ? ort::kMemoryOnHost : ort::kMemoryDefault;
    };
    auto zero = [](const OrtCustomOp*) { return 0; };
    GetVariadicInputMinArity = GetVariadicInputHomogeneity = zero;
    GetVariadicOutputMinArity = GetVariadicOutputHomogeneity = zero;
    CreateKernelV2 = create;
    KernelComputeV2 = compute;
    KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  }

  static OrtStatus* create(const OrtCustomOp*, const void*, const OrtKernelInfo* info, void** out) {
    try {
      auto kernel = std::make_unique<Kernel>();
      CHAIRLIFT_TRY(kernel->init(Attributes(info)));
      *out = kernel.release();
      return nullptr;
    } catch (const std::exception& exception) {
      return error("%s: %s", Kernel::kName, exception.what());
    }
  }

  static OrtStatus* compute(void* kernel, OrtKernelContext* context) {
    try {
      Context wrapped(context, std::data(Kernel::kInputs), std::data(Kernel::kOutputs));
      return static_cast<const Kernel*>(kernel)->compute(wrapped);
    } catch (const std::exception& exception) {
      return error("%s: %s", Kernel::kName, exception.what());
    }
  }
};

}  // namespace detail

// The runtime's description of the op `Kernel`; lives as long as the library.
template <class Kernel>
const OrtCustomOp* custom_op() {
  static const detail::CustomOp<Kernel> op;
  return &op;
}

}  // namespace chairlift
