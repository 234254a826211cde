#define CHAIRLIFT_SIMD_GENERIC
#include "paged_attention.inl"
