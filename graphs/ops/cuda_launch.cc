#include "cuda_launch.h"

#include <dlfcn.h>

#define CHAIRLIFT_EXPORT extern "C" __attribute__((visibility("default")))

namespace chairlift {
namespace {

const CudaStep* g_step = nullptr;

}  // namespace

const CudaStep* cuda_step() { return g_step; }

}  // namespace chairlift

// Makes the CUDA ops launch by `step`, which stays the caller's and must outlive their runs; null: none. Returns 0, or
// 1 when the structure is not this library's.
CHAIRLIFT_EXPORT int chairlift_cuda_use(const chairlift::CudaStep* step) {
  const bool is_ours = step == nullptr || (step->struct_bytes == sizeof(chairlift::CudaStep) &&
                                           step->layout == chairlift::kCudaStepLayout);
  if (!is_ours) return 1;
  chairlift::g_step = step;
  return 0;
}

// The driver's cuLaunchKernel, or null where there is no driver. The driver's library stays loaded.
CHAIRLIFT_EXPORT void* chairlift_cuda_driver_launch() {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  return driver == nullptr ? nullptr : dlsym(driver, "cuLaunchKernel");
}
