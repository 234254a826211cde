// Entry points for the host: launches in the driver's argument form, settings, the reason of a failure.
#include <cfenv>
#include <cstdlib>
#include <mutex>
#include <numeric>
#include <vector>

#include "arithmetic.h"
#include "state.h"

namespace ptx {

template <class F>
static float rounded(int mode, F compute) {
  std::fesetround(mode);
  const volatile float result = compute();
  std::fesetround(FE_TONEAREST);
  return result;
}

float add_rounded(float a, float b, int mode) {
  const volatile float x = a, y = b;
  return rounded(mode, [&] { return x + y; });
}
float mul_rounded(float a, float b, int mode) {
  const volatile float x = a, y = b;
  return rounded(mode, [&] { return x * y; });
}
float fma_rounded(float a, float b, float c, int mode) {
  const volatile float x = a, y = b, z = c;
  return rounded(mode, [&] { return __builtin_fmaf(x, y, z); });
}

}  // namespace ptx

namespace sim {
namespace {

constexpr int success = 0, invalid_value = 1, launch_failed = 719;  // as the driver numbers them

// dims: grid x, y, z, block x, y, z, dynamic shared bytes. The parameters' bytes follow one another without gaps.
using Observer = void (*)(const char* kernel, const uint32_t* dims, const uint8_t* parameters, size_t num_bytes);

std::mutex one_launch;
uint64_t seed = 0;
Observer observer = nullptr;

int refuse(const Kernel& kernel, const std::string& reason) {
  failure = std::string("launch of ") + kernel.name + ": " + reason;
  return invalid_value;
}

void tell_observer(const Kernel& kernel, uint32_t dynamic_bytes, void** arguments) {
  if (!observer) return;
  const uint32_t dims[] = {grid.grid_dim.x,  grid.grid_dim.y,  grid.grid_dim.z, grid.block_dim.x,
                           grid.block_dim.y, grid.block_dim.z, dynamic_bytes};
  std::vector<uint8_t> bytes;
  for (uint32_t i = 0; i < kernel.num_parameters; ++i) {
    const uint8_t* argument = static_cast<const uint8_t*>(arguments[i]);
    bytes.insert(bytes.end(), argument, argument + kernel.parameter_bytes[i]);
  }
  observer(kernel.name, dims, bytes.data(), bytes.size());
}

uint32_t shared_end(const Kernel& kernel, uint32_t dynamic_bytes) {
  uint32_t end = 0;
  for (uint32_t i = 0; i < kernel.num_arrays; ++i) {
    const SharedArray& array = kernel.arrays[i];
    end = std::max(end, array.offset + (array.num_bytes ? array.num_bytes : dynamic_bytes));
  }
  return end;
}

bool run_blocks(const Kernel& kernel, uint32_t dynamic_bytes, void** arguments) {
  std::vector<uint64_t> order(uint64_t{grid.grid_dim.x} * grid.grid_dim.y * grid.grid_dim.z);
  std::iota(order.begin(), order.end(), 0);
  if (seed)
    for (size_t i = order.size(); i > 1; --i) std::swap(order[i - 1], order[random_below(i)]);
  for (uint64_t i : order) {
    const uint32_t n = static_cast<uint32_t>(i);
    grid.block = {n % grid.grid_dim.x, n / grid.grid_dim.x % grid.grid_dim.y, n / grid.grid_dim.x / grid.grid_dim.y};
    set_up_shared(kernel, dynamic_bytes);
    const bool is_good = run_block(arguments);
    tear_down_shared();
    if (!is_good) return false;
  }
  return true;
}

}  // namespace
}  // namespace sim

extern "C" {

// The form of cuLaunchKernel; `function` is the address of a module's sim::Kernel, the stream is ignored: a launch has
// ended when this returns. `extra` must be null.
int sim_launch(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,
               unsigned block_z, unsigned shared_bytes, void*, void** arguments, void** extra) {
  using namespace sim;
  const std::lock_guard<std::mutex> lock(one_launch);
  const Kernel& kernel = *static_cast<const Kernel*>(function);
  const uint64_t num_threads = uint64_t{block_x} * block_y * block_z;
  if (extra) return refuse(kernel, "arguments in `extra` are not supported");
  if (uint64_t{grid_x} * grid_y * grid_z == 0 || grid_y > 65535 || grid_z > 65535)
    return refuse(kernel, "the grid is empty, or larger than 65,535 in y or z");
  if (num_threads == 0 || num_threads > max_threads || block_z > 64)
    return refuse(kernel, "a block has 1 to 1,024 threads, at most 64 in z");
  if (kernel.max_threads && num_threads > kernel.max_threads)
    return refuse(kernel, "more threads than its __launch_bounds__ allow");
  if (shared_bytes > kernel.max_dynamic_shared_bytes)
    return refuse(kernel, "more dynamic shared memory than allowed: 48 KB unless the kernel's attribute is raised");
  running = &kernel;
  grid = {{}, {block_x, block_y, block_z}, {grid_x, grid_y, grid_z}, shared_bytes, shared_end(kernel, shared_bytes)};
  scheduler.is_shuffled = seed != 0;
  scheduler.random = seed * 0x9e3779b97f4a7c15 | 1;
  failure.clear();
  tell_observer(kernel, shared_bytes, arguments);
  begin_launch();
  watch_wild_addresses();
  const bool is_good = run_blocks(kernel, shared_bytes, arguments);
  ignore_wild_addresses();
  finish_launch();
  return is_good ? success : launch_failed;
}

// Why the last launch failed; empty if it did not.
const char* sim_failure() { return sim::failure.c_str(); }

// 0 runs threads and blocks in order; any other number shuffles both, the same way every time.
void sim_set_seed(uint64_t seed) { sim::seed = seed; }

// Backward branches that one thread may take in a launch.
void sim_set_max_branches(uint64_t count) { sim::scheduler.max_branches = count; }

void sim_set_observer(sim::Observer observer) { sim::observer = observer; }

// Returns 1 beyond what a block can have on current GPUs.
int sim_set_max_shared_bytes(void* function, unsigned num_bytes) {
  if (num_bytes > 227 * 1024) return 1;
  static_cast<sim::Kernel*>(function)->max_dynamic_shared_bytes = num_bytes;
  return 0;
}

// Memory of its own for every buffer, so that AddressSanitizer sees an access beyond its end. All ones: NaN.
void* sim_allocate(size_t num_bytes) {
  void* p = nullptr;
  if (posix_memalign(&p, 256, num_bytes)) return nullptr;
  __builtin_memset(p, 0xff, num_bytes);
  return p;
}

void sim_free(void* p) { std::free(p); }
}
