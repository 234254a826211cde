#define CHAIRLIFT_SIMD_AVX512
#include "row_kernels.inl"
