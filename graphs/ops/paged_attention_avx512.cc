#define CHAIRLIFT_SIMD_AVX512
#include "paged_attention.inl"
