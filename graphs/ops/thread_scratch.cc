#include "thread_scratch.h"

#include <cstdlib>

namespace chairlift {
namespace {

constexpr size_t kAlignment = 64;

struct Buffer {
  void* memory = nullptr;
  size_t size_bytes = 0;
  ~Buffer() { std::free(memory); }
};

thread_local Buffer buffers[2];

}  // namespace

void* thread_scratch(Scratch use, size_t size_bytes) {
  Buffer& buffer = buffers[static_cast<int>(use)];
  if (size_bytes > buffer.size_bytes) {
    const size_t rounded = (size_bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = std::aligned_alloc(kAlignment, rounded);
    if (memory == nullptr) return nullptr;
    std::free(buffer.memory);
    buffer.memory = memory;
    buffer.size_bytes = rounded;
  }
  return buffer.memory;
}

}  // namespace chairlift
