#define CHAIRLIFT_SIMD_AVX512
#include "linear_kernels.inl"
