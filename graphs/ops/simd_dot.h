// Exact u8 x s8 dot products of four, for linear_kernels.inl. Include it after simd.h. Each set has:
//
//   DotInput          what a quantised activation is widened or shifted to, kDotOffset less than it was
//   DotWeights        kDotColumns output channels x 4 input channels of int8 weights, ready to multiply
//   DotRow            four activations of one row, repeated for every column
//   DotSums           int32 sums of kDotColumns columns, in some order that dot_store undoes
//   kStripRows, tile_vectors(rows)  rows, and vectors of weights for so many rows, whose sums fit the registers
//   dot_copy(q, out)                converts kDotCopied activations, a multiple of four, at most a cache line of inputs
//   dot_load(p) dot_broadcast(p) dot_zero()
//   dot(&sums, row, weights)        adds the products, four for each column
//   dot_store<n>(p, sums[n])        n * kDotColumns int32, in the order of the columns
#pragma once

#if defined(CHAIRLIFT_SIMD_AVX512)
#include "simd_dot_avx512.h"
#elif defined(CHAIRLIFT_SIMD_AVX2)
#include "simd_dot_avx2.h"
#elif defined(CHAIRLIFT_SIMD_NEON)
#include "simd_dot_neon.h"
#else
#include "simd_dot_generic.h"
#endif
