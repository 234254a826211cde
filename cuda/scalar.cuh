// Scalars of 16 bits and 8 bits, and what a kernel says often. No CUDA header is included anywhere here: NVRTC has none
// on its path, and with none a kernel compiles in a tenth of a second.
#pragma once

#define DEVICE __device__ __forceinline__

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

struct bf16 {
  u16 bits;
};
struct half {
  u16 bits;
};

constexpr float kMasked = -1e30f;  // not -inf: differences of masked scores stay numbers

DEVICE float to_float(float x) { return x; }
DEVICE float to_float(bf16 x) { return __uint_as_float(static_cast<u32>(x.bits) << 16); }
DEVICE float to_float(half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}

template <class T>
DEVICE T from_float(float x);
template <>
DEVICE float from_float<float>(float x) {
  return x;
}
template <>
DEVICE bf16 from_float<bf16>(float x) {
  bf16 y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}
template <>
DEVICE half from_float<half>(float x) {
  half y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
  return y;
}

// Two neighbours in one register, the first in the low half. PTX names the high one first.
template <class T>
DEVICE u32 pack(float first, float second);
template <>
DEVICE u32 pack<bf16>(float first, float second) {
  u32 pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
template <>
DEVICE u32 pack<half>(float first, float second) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}

template <class T>
DEVICE float first_of(u32 pair) {
  return to_float(T{static_cast<u16>(pair)});
}
template <class T>
DEVICE float second_of(u32 pair) {
  return to_float(T{static_cast<u16>(pair >> 16)});
}

// A number within T: an infinity in K or V would turn masked products into NaN. NaN stays, for the row to fail by.
template <class T>
DEVICE float saturate(float x) {
  return x;
}
template <>
DEVICE float saturate<half>(float x) {
  return x > 65504.0f ? 65504.0f : x < -65504.0f ? -65504.0f : x;
}

// 2^x, relative error 2^-22; results below the smallest normal number are 0.
DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x, relative error 2^-23; of what is infinite or beyond 2^126, 0.
DEVICE float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

DEVICE u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEVICE int lane_of_thread() { return threadIdx.x & 31; }
DEVICE int warp_of_thread() { return threadIdx.x >> 5; }

constexpr u32 kWholeWarp = 0xffffffffu;
