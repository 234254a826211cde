// The narrow float formats of PTX: exact to float, rounded to nearest even from float.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace ptx {

template <class To, class From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(To));
  return to;
}

inline uint32_t bits(float x) { return bit_cast<uint32_t>(x); }
inline uint64_t bits(double x) { return bit_cast<uint64_t>(x); }
inline float f32(uint32_t x) { return bit_cast<float>(x); }
inline double f64(uint64_t x) { return bit_cast<double>(x); }

struct half {
  uint16_t raw;
};
struct bf16 {
  uint16_t raw;
};
struct e4m3 {
  uint8_t raw;
};
struct e5m2 {
  uint8_t raw;
};

// Two numbers in one register, `lo` in the lower bits.
template <class T>
struct pair {
  T lo, hi;
};

// By its bits, as g++ would call a function. The product is exact, of a subnormal too; above it infinity and NaN, quiet.
inline float to_float(half x) {
  const uint32_t sign = (x.raw & 0x8000u) << 16, magnitude = (x.raw & 0x7fffu) << 13, infinity = 0x7c00u << 13;
  if (magnitude < infinity) return f32(bits(f32(magnitude) * 0x1p112f) | sign);
  return f32(magnitude | 0x7f800000u | sign | (magnitude > infinity ? 0x400000u : 0));
}
inline float to_float(bf16 x) { return f32(static_cast<uint32_t>(x.raw) << 16); }

template <class T>
T from_float(double x);

template <>
inline half from_float<half>(double x) {
  return x != x ? half{0x7fff} : half{bit_cast<uint16_t>(static_cast<_Float16>(x))};
}

// A double holds the product and nearly every sum of two bf16 exactly, so it is rounded once, by its own bits.
template <>
inline bf16 from_float<bf16>(double x) {
  if (x != x) return bf16{0x7fff};
  float f = static_cast<float>(x);
  uint32_t u = bits(f);
  if (static_cast<double>(f) != x && (u & 0xffff) == 0x8000) u = std::fabs(f) < std::fabs(x) ? u + 1 : u - 1;
  return bf16{static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}

// 8-bit floats: one sign bit, then exponent, then `mantissa_bits`.
template <int mantissa_bits, int bias>
float decode_float8(uint8_t raw) {
  const int exponent = raw >> mantissa_bits & ((1 << (7 - mantissa_bits)) - 1);
  const int mantissa = raw & ((1 << mantissa_bits) - 1);
  const int significand = exponent ? mantissa + (1 << mantissa_bits) : mantissa;
  const float magnitude = std::ldexp(static_cast<float>(significand), std::max(exponent, 1) - bias - mantissa_bits);
  return raw & 0x80 ? -magnitude : magnitude;
}

// Values beyond `largest` become `largest`, as .satfinite says.
template <int mantissa_bits, int bias>
uint8_t encode_float8(double x, uint8_t largest) {
  const uint8_t sign = std::signbit(x) ? 0x80 : 0;
  const double magnitude = std::min(std::fabs(x), static_cast<double>(decode_float8<mantissa_bits, bias>(largest)));
  const int exponent = magnitude == 0 ? 1 - bias : std::max(std::ilogb(magnitude), 1 - bias);
  const int significand = static_cast<int>(std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent)));
  return sign | static_cast<uint8_t>(significand + ((exponent + bias - 1) << mantissa_bits));
}

inline float to_float(e4m3 x) { return (x.raw & 0x7f) == 0x7f ? NAN : decode_float8<3, 7>(x.raw); }
inline float to_float(e5m2 x) {
  if ((x.raw & 0x7f) == 0x7c) return x.raw & 0x80 ? -INFINITY : INFINITY;
  return (x.raw & 0x7f) > 0x7c ? NAN : decode_float8<2, 15>(x.raw);
}
template <>
inline e4m3 from_float<e4m3>(double x) {
  return x != x ? e4m3{0x7f} : e4m3{encode_float8<3, 7>(x, 0x7e)};
}
template <>
inline e5m2 from_float<e5m2>(double x) {
  return x != x ? e5m2{0x7f} : e5m2{encode_float8<2, 15>(x, 0x7b)};
}

inline uint16_t bits(half x) { return x.raw; }
inline uint16_t bits(bf16 x) { return x.raw; }
template <class T>
uint32_t bits(pair<T> x) {
  return bit_cast<std::conditional_t<sizeof(T) == 2, uint32_t, uint16_t>>(x);
}

}  // namespace ptx
