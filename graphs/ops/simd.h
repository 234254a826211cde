// One vector of floats, four implementations. Included by .inl kernels; the including .cc names the set first:
//
//   // row_kernels_avx512.cc
//   #define CHAIRLIFT_SIMD_AVX512
//   #include "row_kernels.inl"      // which includes simd.h and opens namespace chairlift::CHAIRLIFT_SIMD_NS
//
// `Vec` holds kLanes floats: 16 (AVX-512), 8 (AVX2 + FMA + F16C; plain arrays), 4 (NEON). All functions below exist in
// each set:
//   zero() set1(x) load(p) store(p, v) load_partial(p, n) store_partial(p, v, n)   n < kLanes; missing lanes are zero
//   add sub mul div min max sqrt abs round(half to even) fma(a, b, c) = a * b + c
//   select_less(a, b, x, y) = a < b ? x : y
//   reduce_add reduce_max reduce_min                   fixed order: the same bits every time
//   load_f16(p) store_f16(p, v) load_i8(p)             to and from float
//   store_i8(p, v)                                     whole numbers within the type's range
//   scale_by_power(v, n) = v * 2^n for whole n <= 127; 0 for n < -126
//   exp_within(v)                                      e^v for v within [-87, 88], errors up to 1e-7 + 4e-8 |v|;
//                                                      exactly 1 for 0
//   reciprocal(v)                                      1 / v within 1 ulp; for 1 <= |v| < 2^126
//
// A rule for code that includes this: no templates or inline functions from outside the set's namespace (so no
// std::min, std::vector). The linker keeps one copy of those for all sets, and it could be the one built for AVX-512.
#pragma once

#include <cstdint>
#include <cstring>

#define CHAIRLIFT_INLINE [[maybe_unused]] static inline __attribute__((always_inline))

#if defined(CHAIRLIFT_SIMD_AVX512)
#define CHAIRLIFT_SIMD_NS avx512
#include "simd_avx512.h"
#elif defined(CHAIRLIFT_SIMD_AVX2)
#define CHAIRLIFT_SIMD_NS avx2
#include "simd_avx2.h"
#elif defined(CHAIRLIFT_SIMD_NEON)
#define CHAIRLIFT_SIMD_NS neon
#include "simd_neon.h"
#elif defined(CHAIRLIFT_SIMD_GENERIC)
#define CHAIRLIFT_SIMD_NS generic
#include "simd_generic.h"
#else
#error "define CHAIRLIFT_SIMD_AVX512, _AVX2, _NEON or _GENERIC before including simd.h"
#endif

namespace chairlift::CHAIRLIFT_SIMD_NS {

// 2^n * 2^f with f within [-1/2, 1/2] and a minimax polynomial for 2^f.
CHAIRLIFT_INLINE Vec exp_within(Vec x) {
  const Vec log2_of_e = set1(1.44269504088896341f);
  const Vec n = round(mul(x, log2_of_e));
  const Vec f = fma(x, log2_of_e, sub(zero(), n));
  Vec p = set1(1.32647273e-3f);
  p = fma(p, f, set1(9.67151299e-3f));
  p = fma(p, f, set1(5.55073358e-2f));
  p = fma(p, f, set1(2.40222424e-1f));
  p = fma(p, f, set1(6.93147004e-1f));
  p = fma(p, f, set1(1.0f));
  return scale_by_power(p, n);
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
