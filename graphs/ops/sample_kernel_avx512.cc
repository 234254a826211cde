#define CHAIRLIFT_SIMD_AVX512
#include "sample_kernel.inl"
