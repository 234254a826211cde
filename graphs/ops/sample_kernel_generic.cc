#define CHAIRLIFT_SIMD_GENERIC
#include "sample_kernel.inl"
