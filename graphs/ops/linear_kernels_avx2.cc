#define CHAIRLIFT_SIMD_AVX2
#include "linear_kernels.inl"
