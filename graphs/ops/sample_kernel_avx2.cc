#define CHAIRLIFT_SIMD_AVX2
#include "sample_kernel.inl"
