#define CHAIRLIFT_SIMD_NEON
#include "paged_attention.inl"
