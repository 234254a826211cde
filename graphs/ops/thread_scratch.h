// Scratch memory of the calling thread.
#pragma once

#include <cstddef>

namespace chairlift {

// At least `size_bytes` bytes, aligned to 64, that stay valid and belong to the caller until the thread's next call.
// Grows to the largest size ever asked for and is freed with the thread. Null when there is no memory.
void* thread_scratch(size_t size_bytes);

}  // namespace chairlift
