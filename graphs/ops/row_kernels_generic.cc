#define CHAIRLIFT_SIMD_GENERIC
#include "row_kernels.inl"
