#define CHAIRLIFT_SIMD_NEON
#include "row_kernels.inl"
