#define CHAIRLIFT_SIMD_AVX2
#include "paged_attention.inl"
