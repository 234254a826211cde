// Vectors of kLanes 32-bit words beside the floats of simd.h, masks of lanes, and packing lanes together.
//
// `Words` wraps around like uint32_t. All functions below exist in each set:
//   words(x) load_words(p) store_words(p, v) load_words_partial(p, n)
//   add sub mul xor_words shift_right<n>               lane by lane; mul yields the low half
//   mul_wide(a, b, &high, &low)                        all 64 bits of the unsigned products
//   to_float(v)                                        of signed words
//   round_words(v)                                     of floats, to the nearest, half to even, as signed words
//   store_bytes(p, w)                                  signed words w[0..4), one vector after the other, as 4 * kLanes
//                                                      bytes; within int16, from there saturated to 0 to 255
//   less_mask(a, b)                                    bit i: a[i] < b[i]
//   keep_lanes(v, n)                                   zero but for the first n <= kLanes lanes
//   lane_numbers()                                     0, 1, ..., kLanes - 1
//   pack_store(p, v, mask)                             the lanes of a Vec or Words in `mask`, one after the other; the
//                                                      rest of p[0..kLanes) is overwritten with anything
//   interleave_quads(w)                                w[0..4): afterwards the words of the four vectors in a row are
//                                                      w[0], w[1], w[2], w[3] of one lane after the other; lane l
//                                                      comes quad_order()[l]-th
#pragma once

#include "simd.h"

#if defined(CHAIRLIFT_SIMD_AVX512)
#include "simd_words_avx512.h"
#elif defined(CHAIRLIFT_SIMD_AVX2)
#include "simd_words_avx2.h"
#elif defined(CHAIRLIFT_SIMD_NEON)
#include "simd_words_neon.h"
#else
#include "simd_words_generic.h"
#endif
