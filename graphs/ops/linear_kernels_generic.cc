#define CHAIRLIFT_SIMD_GENERIC
#include "linear_kernels.inl"
