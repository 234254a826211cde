// Shared memory of the running block, with the state of every byte beside it.
#include <cstdlib>
#include <cstring>

#include "state.h"

namespace sim {
namespace {

enum ByteState : uint8_t { outside, fresh, written, pending };

char* memory = nullptr;
uint8_t* states = nullptr;
uint32_t memory_bytes = 0;

uint64_t checked_offset(const char* where, uint64_t address, uint32_t num_bytes) {
  const uint64_t offset = address - shared_base;
  if (offset > memory_bytes || offset + num_bytes > memory_bytes)
    fail(where, "address 0x%llx lies outside shared memory (was a pointer not converted to a shared address?)",
         static_cast<unsigned long long>(address));
  if (address % num_bytes)
    fail(where, "misaligned access of %u bytes at shared address %llu", num_bytes,
         static_cast<unsigned long long>(address));
  return offset;
}

// The one question of nearly every access; the others say what is wrong where the answer is no.
bool is_written(uint64_t offset, uint32_t num_bytes) {
  static_assert(written == 2);
  for (; num_bytes >= 4; offset += 4, num_bytes -= 4) {
    uint32_t four;
    std::memcpy(&four, states + offset, 4);
    if (four != 0x02020202u) return false;
  }
  for (; num_bytes; ++offset, --num_bytes)
    if (states[offset] != written) return false;
  return true;
}

void check_inside(const char* where, uint64_t offset, uint32_t num_bytes) {
  for (uint32_t i = 0; i < num_bytes; ++i)
    if (states[offset + i] == outside) fail(where, "out of bounds of an array in shared memory");
}

void check_readable(const char* where, uint64_t offset, uint32_t num_bytes) {
  check_inside(where, offset, num_bytes);
  for (uint32_t i = 0; i < num_bytes; ++i) {
    if (states[offset + i] == fresh) fail(where, "reads shared memory that nobody wrote");
    if (states[offset + i] == pending) fail(where, "reads shared memory before the wait that covers its cp.async");
  }
}

void check_writable(const char* where, uint64_t offset, uint32_t num_bytes) {
  check_inside(where, offset, num_bytes);
  for (uint32_t i = 0; i < num_bytes; ++i)
    if (states[offset + i] == pending) fail(where, "writes shared memory that a cp.async in flight writes too");
}

void set_states(uint64_t offset, uint32_t num_bytes, ByteState state) {
  for (uint32_t i = 0; i < num_bytes; ++i) states[offset + i] = state;
}

}  // namespace

char* shared_read(const char* where, uint64_t address, uint32_t num_bytes) {
  const uint64_t offset = checked_offset(where, address, num_bytes);
  if (!is_written(offset, num_bytes)) check_readable(where, offset, num_bytes);
  return memory + offset;
}

char* shared_write(const char* where, uint64_t address, uint32_t num_bytes) {
  const uint64_t offset = checked_offset(where, address, num_bytes);
  if (is_written(offset, num_bytes)) return memory + offset;
  check_writable(where, offset, num_bytes);
  set_states(offset, num_bytes, written);
  return memory + offset;
}

char* shared_update(const char* where, uint64_t address, uint32_t num_bytes) {
  return shared_read(where, address, num_bytes);
}

char* shared_pending(const char* where, uint64_t address, uint32_t num_bytes) {
  const uint64_t offset = checked_offset(where, address, num_bytes);
  check_writable(where, offset, num_bytes);
  set_states(offset, num_bytes, pending);
  return memory + offset;
}

void shared_landed(const char* target, uint32_t num_bytes) {
  set_states(static_cast<uint64_t>(target - memory), num_bytes, written);
}

void set_up_shared(const Kernel& kernel, uint32_t dynamic_bytes) {
  const Unwatched unwatched;
  memory_bytes = grid.total_shared_bytes;
  // Page aligned: an offset's alignment is its address's. All ones are NaN in every float type.
  const size_t room = (memory_bytes + 4096) / 4096 * 4096;
  memory = static_cast<char*>(std::aligned_alloc(4096, room));
  states = static_cast<uint8_t*>(std::calloc(room, 1));
  std::memset(memory, 0xff, room);
  for (uint32_t i = 0; i < kernel.num_arrays; ++i) {
    const SharedArray& array = kernel.arrays[i];
    set_states(array.offset, array.num_bytes ? array.num_bytes : dynamic_bytes, fresh);
  }
}

void tear_down_shared() {
  const Unwatched unwatched;
  std::free(memory);
  std::free(states);
  memory = nullptr, states = nullptr;
}

}  // namespace sim
