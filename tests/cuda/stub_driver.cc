// A libcuda.so.1 whose device is the host: what service/executor/cuda/driver.py calls, for a test of its calls.
//
// Memory is counted, so that what is not freed shows; a wait is an event that was recorded before it. What gives
// something back does so even where it reports an error.
#include <dlfcn.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace {

int g_allocations = 0;
int g_recorded = 0;
int g_contexts = 0;
unsigned g_last_grid = 0;
unsigned g_context_flags = 0;
int g_unlocked = 0;  // calls that enqueue, without the interpreter lock
const char* g_failing = "";  // the functions that fail, between spaces
constexpr int kSuccess = 0;
constexpr int kInvalidValue = 1;
constexpr int kOutOfMemory = 2;
constexpr int kLaunchFailed = 719;
#ifndef STUB_MAX_BLOCKS
#define STUB_MAX_BLOCKS 32  // of a kernel that a multiprocessor has room for
#endif
#ifndef STUB_MEMORY_BYTES
#define STUB_MEMORY_BYTES (1 << 20)
#endif
constexpr size_t kMemoryBytes = STUB_MEMORY_BYTES;

struct Copy2D {  // CUDA_MEMCPY2D
  size_t source_x, source_y;
  unsigned source_type;
  const char* source_host;
  uint64_t source_device;
  void* source_array;
  size_t source_pitch, target_x, target_y;
  unsigned target_type;
  void* target_host;
  char* target_device;
  void* target_array;
  size_t target_pitch, width_bytes, height;
};

int result(const char* spaced_name) { return std::strstr(g_failing, spaced_name) ? kLaunchFailed : kSuccess; }

struct CopyAttributes {  // CUmemcpyAttributes
  int source_order;
  int source_place[2], target_place[2];
  unsigned flags;
};

// Whether the calling thread keeps other Python threads from running.
bool lock_is_held() {
  static const auto check = reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  return check != nullptr && check() != 0;
}

// The result of what only enqueues, in the one stream there is.
int enqueued(const void* stream) {
  g_unlocked += !lock_is_held();
  return stream == &g_recorded ? kSuccess : kInvalidValue;
}

// A number that the process was given in its environment.
int chosen(const char* name, int otherwise) {
  const char* number = std::getenv(name);
  return number ? std::atoi(number) : otherwise;
}

int capability() { return chosen("STUB_CAPABILITY", 90); }

}  // namespace

extern "C" {

int cuGetExportTable(const void**, const void*) { return kInvalidValue; }
int cuInit(unsigned) { return kSuccess; }
int cuDriverGetVersion(int* version) { return *version = chosen("STUB_DRIVER_VERSION", 13000), kSuccess; }
int cuDeviceGetCount(int* count) { return *count = 1, kSuccess; }
int cuDeviceGet(int* device, int) { return *device = 0, result(" cuDeviceGet "); }
int cuDeviceGetName(char* name, int length, int) { return std::strncpy(name, "stub", length), kSuccess; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
  switch (attribute) {
    case 13: return *value = 1980000, kSuccess;    // clock, kHz
    case 16: return *value = 132, result(" cuDeviceGetAttribute ");  // multiprocessors
    case 36: return *value = 3200000, kSuccess;    // memory clock, kHz
    case 37: return *value = 6144, kSuccess;       // width of the memory's bus, bits
    case 38: return *value = 50 << 20, kSuccess;   // L2 cache
    case 75: return *value = capability() / 10, kSuccess;  // major
    case 76: return *value = capability() % 10, kSuccess;  // minor
    case 97: return *value = 227 << 10, kSuccess;  // shared memory that a block may ask for
  }
  return kInvalidValue;
}
int cuDevicePrimaryCtxGetState(int, unsigned* flags, int* is_active) {
  return *flags = g_context_flags, *is_active = g_contexts > 0, result(" cuDevicePrimaryCtxGetState ");
}
int cuDevicePrimaryCtxSetFlags(int, unsigned flags) {
  if (g_contexts > 0) return kInvalidValue;  // here: too late, whoever has made it may wait by other flags
  return g_context_flags = flags, result(" cuDevicePrimaryCtxSetFlags ");
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  if (result(" cuDevicePrimaryCtxRetain ")) return kLaunchFailed;
  return ++g_contexts, *context = &g_contexts, kSuccess;
}
int cuDevicePrimaryCtxRelease(int) { return --g_contexts, kSuccess; }
int cuCtxSetCurrent(void* context) {
  return context == &g_contexts ? result(" cuCtxSetCurrent ") : kInvalidValue;
}
int cuStreamCreate(void** stream, unsigned) {
  if (result(" cuStreamCreate ")) return kLaunchFailed;
  return ++g_allocations, *stream = &g_recorded, kSuccess;
}
int cuStreamDestroy(void*) { return --g_allocations, result(" cuStreamDestroy "); }
int cuStreamQuery(void* stream) { return stream == &g_recorded ? kSuccess : kInvalidValue; }
int cuEventCreate(void** event, unsigned flags) {
  constexpr unsigned kBlockingWithoutTiming = 3;
  if (flags != kBlockingWithoutTiming && flags != 0) return kInvalidValue;
  if (result(" cuEventCreate ")) return kLaunchFailed;
  return ++g_allocations, *event = &g_recorded, kSuccess;
}
int cuEventDestroy(void*) { return --g_allocations, result(" cuEventDestroy "); }
int cuEventRecord(void*, void* stream) { return ++g_recorded, enqueued(stream); }
int cuEventSynchronize(void*) { return g_recorded > 0 && !lock_is_held() ? kSuccess : kInvalidValue; }
int cuEventElapsedTime(float* milliseconds, void*, void*) { return *milliseconds = 1, kSuccess; }
int cuStreamBeginCapture(void*, int) { return kSuccess; }
int cuStreamEndCapture(void*, void** graph) { return ++g_allocations, *graph = &g_recorded, kSuccess; }
int cuGraphInstantiateWithFlags(void** graph, void*, unsigned long long) {
  return ++g_allocations, *graph = &g_recorded, kSuccess;
}
int cuGraphLaunch(void*, void*) { return kSuccess; }
int cuGraphExecDestroy(void*) { return --g_allocations, kSuccess; }
int cuGraphDestroy(void*) { return --g_allocations, kSuccess; }
int cuMemGetInfo(size_t* free, size_t* total) { return *free = *total = kMemoryBytes, kSuccess; }
int cuMemAlloc(char** address, size_t bytes) {
  if (bytes > kMemoryBytes) return kOutOfMemory;
  return ++g_allocations, *address = static_cast<char*>(std::malloc(bytes)), kSuccess;
}
int cuMemFree(char* address) { return --g_allocations, std::free(address), kSuccess; }
int cuMemHostAlloc(char** address, size_t bytes, unsigned) { return cuMemAlloc(address, bytes); }
int cuMemFreeHost(char* address) { return cuMemFree(address); }
int cuMemcpyHtoDAsync(char* to, const char* from, size_t n, void* stream) {
  return std::memcpy(to, from, n), enqueued(stream);
}
int cuMemcpyDtoHAsync(char* to, const char* from, size_t n, void* stream) {
  return std::memcpy(to, from, n), enqueued(stream);
}
int cuMemcpyDtoDAsync(char* to, const char* from, size_t n, void* stream) {
  return std::memcpy(to, from, n), enqueued(stream);
}
int cuMemsetD8Async(char* to, unsigned char value, size_t n, void* stream) {
  return std::memset(to, value, n), enqueued(stream);
}
int cuMemcpyBatchAsync(char** to, char** from, const size_t* n, size_t count, const CopyAttributes* attributes,
                       const size_t* first, size_t num_attributes, void* stream) {
  constexpr int kSourceInStreamOrder = 1;
  if (num_attributes != 1 || *first != 0 || attributes->source_order != kSourceInStreamOrder) return kInvalidValue;
  if (attributes->flags != 0 || lock_is_held() || stream != &g_recorded) return kInvalidValue;
  for (size_t i = 0; i < count; ++i) std::memcpy(to[i], from[i], n[i]);
  return kSuccess;
}
int cuMemcpy2DAsync(const Copy2D* copy, void* stream) {
  constexpr unsigned kHost = 1;
  constexpr unsigned kDevice = 2;
  if (copy->source_type != kHost || copy->target_type != kDevice) return kInvalidValue;
  for (size_t row = 0; row < copy->height; ++row) {
    std::memcpy(copy->target_device + row * copy->target_pitch, copy->source_host + row * copy->source_pitch,
                copy->width_bytes);
  }
  return enqueued(stream);
}
int cuModuleLoadData(void** module, const void*) { return ++g_allocations, *module = &g_recorded, kSuccess; }
int cuModuleUnload(void*) { return --g_allocations, result(" cuModuleUnload "); }
int cuModuleGetFunction(void** function, void*, const char*) { return *function = &g_recorded, kSuccess; }
int cuFuncGetAttribute(int* value, int attribute, void*) {
  constexpr int kRegisters = 4;
  return *value = attribute == kRegisters ? 32 : 0, kSuccess;
}
int cuFuncSetAttribute(void*, int, int) { return kSuccess; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, void* function, int threads, size_t shared_bytes) {
  const int fit = static_cast<int>(shared_bytes / static_cast<size_t>(threads));
  return *blocks = fit < STUB_MAX_BLOCKS ? fit : STUB_MAX_BLOCKS, function ? kSuccess : kInvalidValue;
}
int cuLaunchKernel(void*, unsigned grid_x, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**,
                   void**) {
  return g_last_grid = grid_x, kSuccess;
}

void stub_fail(const char* spaced_names) { g_failing = spaced_names; }
unsigned stub_context_flags() { return g_context_flags; }
unsigned stub_last_grid() { return g_last_grid; }
int stub_num_unlocked() { return g_unlocked; }
int stub_num_left() { return g_allocations + g_contexts; }

int cuGetProcAddress_v2(const char* name, void** function, int, uint64_t, int* status) {
  *function = dlsym(RTLD_DEFAULT, name);
  if (*function == nullptr) *function = dlsym(dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD), name);
  if (status != nullptr) *status = *function == nullptr;
  return kSuccess;
}
int cuGetProcAddress(const char* name, void** function, int version, uint64_t flags, int* status) {
  return cuGetProcAddress_v2(name, function, version, flags, status);
}
}
