// Scratch memory of the calling thread.
#pragma once

#include <cstddef>

namespace chairlift {

// A thread that forks takes part in the work: it has one buffer for what all tasks of a call share and another for what
// one task needs.
enum class Scratch { call, task };

// At least `size_bytes` bytes, aligned to 64, that stay valid and belong to the caller until the thread's next call
// with the same `use`. Grows to the largest size ever asked for and is freed with the thread. Null when there is no
// memory.
void* thread_scratch(Scratch use, size_t size_bytes);

}  // namespace chairlift
