#define CHAIRLIFT_SIMD_NEON
#include "sample_kernel.inl"
