// Included by memory_ops.cu, to see how code of a header is named.
#pragma once
__device__ __forceinline__ void trap_if(bool is_bad) {
  if (is_bad) __trap();
}
