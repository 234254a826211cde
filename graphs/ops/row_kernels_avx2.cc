#define CHAIRLIFT_SIMD_AVX2
#include "row_kernels.inl"
