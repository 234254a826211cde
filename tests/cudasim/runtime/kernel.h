// The parts of the simulator that must be compiled with a kernel, because sanitizers have to see their accesses.
#pragma once

#include "arithmetic.h"
#include "simulator.h"

namespace sim {

inline void check_aligned(const char* where, const void* p, uint32_t num_bytes) {
  if (reinterpret_cast<uintptr_t>(p) % num_bytes) fail(where, "misaligned access of %u bytes at %p", num_bytes, p);
}

inline char* global(const char* where, uint64_t address, uint32_t num_bytes) {
  char* p = reinterpret_cast<char*>(address);
  check_aligned(where, p, num_bytes);
  return p;
}

inline bool is_shared(uint64_t address) { return address - generic_shared < generic_shared_bytes; }

using Check = char* (*)(const char*, uint64_t, uint32_t);

// A generic address: shared memory or everything else.
inline char* generic(const char* where, uint64_t address, uint32_t num_bytes, Check check) {
  return is_shared(address) ? check(where, address - generic_shared, num_bytes) : global(where, address, num_bytes);
}

template <class T>
T load(const char* p) { return *reinterpret_cast<const T*>(p); }
template <class T>
void store(char* p, T value) { *reinterpret_cast<T*>(p) = value; }

// volatile, relaxed, acquire and release accesses: never hoisted out of a loop, and no race among themselves.
template <class T>
T load_strong(const char* p, bool acquire) {
  const T value = __atomic_load_n(reinterpret_cast<const T*>(p), __ATOMIC_RELAXED);
  after_atomic(p, acquire);
  return value;
}
template <class T>
void store_strong(char* p, T value, bool release) {
  before_atomic(p, release);
  __atomic_store_n(reinterpret_cast<T*>(p), value, __ATOMIC_RELAXED);
}

template <class T>
T divisor(const char* where, T value) {
  if (value == 0) fail(where, "integer division by zero");
  return value;
}

// Replaces *p by next(*p), returns what was there. T is the unsigned type of the access.
template <class T, class F>
T atomic(char* p, bool acquire, bool release, F next) {
  T* cell = reinterpret_cast<T*>(p);
  before_atomic(p, release);
  T old = __atomic_load_n(cell, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(cell, &old, next(old), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  after_atomic(p, acquire);
  return old;
}

// ---- cp.async: data arrives at the covering wait and not before; until then the target holds NaN
inline void copy_async(const char* where, uint64_t to, uint64_t from, uint32_t num_bytes, uint32_t num_source_bytes) {
  if (num_source_bytes > num_bytes) fail(where, "cp.async: source size %u above %u", num_source_bytes, num_bytes);
  char* target = shared_pending(where, to, num_bytes);
  const char* source = reinterpret_cast<const char*>(from);
  if (num_source_bytes) check_aligned(where, source, num_bytes);
  for (uint32_t i = 0; i < num_bytes; i += 4) store(target + i, ~0u);
  // Read here too, so that a source out of bounds is reported at this line, not at the wait's.
  for (uint32_t i = 0; i < num_source_bytes; ++i) (void)*static_cast<const volatile char*>(source + i);
  record_copy(where, {target, source, num_bytes, num_source_bytes});
}

inline void wait_copies(int keep) {
  while (const Copy* copy = next_landing(keep)) {
    for (uint32_t i = 0; i < copy->num_bytes; ++i) copy->to[i] = i < copy->num_source_bytes ? copy->from[i] : 0;
    shared_landed(copy->to, copy->num_bytes);
  }
}

// ---- ldmatrix: lanes 8m to 8m + 7 name the rows of matrix m; every lane reads its own elements of every matrix
template <int count>
void load_matrices(const char* where, bool is_generic, bool transposed, uint64_t row, uint32_t (&out)[count]) {
  uint64_t rows[32];
  gather_addresses(where, row - (is_generic ? generic_shared : 0), rows);
  const char* cells[count * 8];
  for (int i = 0; i < count * 8; ++i) cells[i] = shared_read(where, rows[i], 16);
  const uint32_t lane = self->lane;
  for (int m = 0; m < count; ++m) {
    const char* const* matrix = cells + m * 8;
    const auto element = [&](uint32_t i, uint32_t j) {
      return static_cast<uint32_t>(transposed ? load<uint16_t>(matrix[j] + i * 2) : load<uint16_t>(matrix[i] + j * 2));
    };
    out[m] = element(lane / 4, lane % 4 * 2) | element(lane / 4, lane % 4 * 2 + 1) << 16;
  }
}

}  // namespace sim
