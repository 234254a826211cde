#define CHAIRLIFT_SIMD_NEON
#include "linear_kernels.inl"
