// Instructions of PTX that concern one thread's registers only, as functions of the same name.
#pragma once

#include <cfenv>
#include <limits>
#include <type_traits>

#include "formats.h"

namespace ptx {

// ---- integers and floats; `+ - *` of signed integers wrap (-fwrapv)
template <class T>
using number = std::enable_if_t<std::is_arithmetic_v<T>, T>;
template <class T>
number<T> add(T a, T b) { return static_cast<T>(a + b); }
template <class T>
number<T> sub(T a, T b) { return static_cast<T>(a - b); }
template <class T>
number<T> mul(T a, T b) { return static_cast<T>(a * b); }
template <class T>
number<T> neg(T a) { return static_cast<T>(-a); }
template <class T>
number<T> abs(T a) { return static_cast<T>(a < 0 ? -a : a); }
template <class T>
number<T> min(T a, T b) { return b < a ? b : a; }
template <class T>
number<T> max(T a, T b) { return a < b ? b : a; }
template <class T>
number<T> div(T a, T b) {
  if constexpr (std::is_signed_v<T>) return b == -1 ? static_cast<T>(-a) : static_cast<T>(a / b);
  return static_cast<T>(a / b);
}
template <class T>
number<T> rem(T a, T b) {
  if constexpr (std::is_signed_v<T>) return b == -1 ? T(0) : static_cast<T>(a % b);
  return static_cast<T>(a % b);
}
inline float abs(float a) { return std::fabs(a); }
inline double abs(double a) { return std::fabs(a); }
inline float min(float a, float b) { return std::fmin(a, b); }
inline float max(float a, float b) { return std::fmax(a, b); }
inline double min(double a, double b) { return std::fmin(a, b); }
inline double max(double a, double b) { return std::fmax(a, b); }
inline float div(float a, float b) { return a / b; }
inline double div(double a, double b) { return a / b; }
inline float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
inline double fma(double a, double b, double c) { return __builtin_fma(a, b, c); }
template <class T>
T min_nan(T a, T b) { return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : min(a, b); }
template <class T>
T max_nan(T a, T b) { return a != a || b != b ? std::numeric_limits<T>::quiet_NaN() : max(a, b); }
inline float copysign(float a, float b) { return std::copysign(b, a); }
inline double copysign(double a, double b) { return std::copysign(b, a); }
inline float saturate(float a) { return a > 0 ? std::fmin(a, 1.f) : 0.f; }  // NaN becomes 0
inline int32_t saturate(int64_t a) {
  return static_cast<int32_t>(min<int64_t>(max<int64_t>(a, INT32_MIN), INT32_MAX));
}
inline float flush(float a) { return std::fabs(a) < std::numeric_limits<float>::min() ? std::copysign(0.f, a) : a; }

// Other rounding than to nearest; not inlined, so that nothing moves across the change of mode.
float add_rounded(float a, float b, int mode);
float mul_rounded(float a, float b, int mode);
float fma_rounded(float a, float b, float c, int mode);

// ---- 16-bit floats and pairs of them: computed in double, rounded once
template <class T>
using if_narrow = std::enable_if_t<std::is_same_v<T, half> || std::is_same_v<T, bf16>, T>;
#define PTX_NARROW(name, expression)                                         \
  template <class T>                                                         \
  if_narrow<T> name(T x, T y) {                                              \
    const double a = to_float(x), b = to_float(y);                           \
    return from_float<T>(expression);                                        \
  }                                                                          \
  template <class T>                                                         \
  pair<T> name(pair<T> x, pair<T> y) { return {name(x.lo, y.lo), name(x.hi, y.hi)}; }
PTX_NARROW(add, a + b)
PTX_NARROW(sub, a - b)
PTX_NARROW(mul, a* b)
PTX_NARROW(min, std::fmin(a, b))
PTX_NARROW(max, std::fmax(a, b))
#undef PTX_NARROW
template <class T>
if_narrow<T> fma(T a, T b, T c) {
  return from_float<T>(static_cast<double>(to_float(a)) * to_float(b) + to_float(c));
}
template <class T>
pair<T> fma(pair<T> a, pair<T> b, pair<T> c) { return {fma(a.lo, b.lo, c.lo), fma(a.hi, b.hi, c.hi)}; }
template <class T>
if_narrow<T> neg(T a) { return T{static_cast<uint16_t>(a.raw ^ 0x8000)}; }
template <class T>
if_narrow<T> abs(T a) { return T{static_cast<uint16_t>(a.raw & 0x7fff)}; }
template <class T>
pair<T> neg(pair<T> a) { return {neg(a.lo), neg(a.hi)}; }
template <class T>
pair<T> abs(pair<T> a) { return {abs(a.lo), abs(a.hi)}; }

// ---- wide products
template <class T>
T mul_hi(T a, T b) {
  using Wide = std::conditional_t<sizeof(T) == 8, std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>,
                                  std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>>;
  return static_cast<T>(static_cast<Wide>(a) * static_cast<Wide>(b) >> sizeof(T) * 8);
}

// ---- bits
template <class T>
T and_(T a, T b) { return a & b; }
template <class T>
T or_(T a, T b) { return a | b; }
template <class T>
T xor_(T a, T b) { return a ^ b; }
template <class T>
T not_(T a) { return static_cast<T>(~a); }
inline bool not_(bool a) { return !a; }
template <class T>
T cnot(T a) { return a == 0; }
template <class T>
T shl(T a, uint32_t n) { return n < sizeof(T) * 8 ? static_cast<T>(a << n) : T(0); }
template <class T>
T shr(T a, uint32_t n) {
  constexpr uint32_t last = sizeof(T) * 8 - 1;
  return n <= last ? static_cast<T>(a >> n) : static_cast<T>(a < 0 ? -1 : 0);
}
template <class T>
uint32_t popc(T a) { return static_cast<uint32_t>(__builtin_popcountll(a)); }
template <class T>
uint32_t clz(T a) { return static_cast<uint32_t>(a ? __builtin_clzll(a) - (64 - sizeof(T) * 8) : sizeof(T) * 8); }
template <class T>
T brev(T a) {
  T r = 0;
  for (unsigned i = 0; i < sizeof(T) * 8; ++i) r = static_cast<T>(r << 1 | (a >> i & 1));
  return r;
}
// The highest bit that differs from the sign, ~0 if there is none.
template <class T>
uint32_t bfind(T a) {
  const std::make_unsigned_t<T> u = a < 0 ? ~a : a;
  return u ? sizeof(T) * 8 - 1 - clz(u) : ~0u;
}
template <class T>
uint32_t bfind_shiftamt(T a) {
  const uint32_t found = bfind(a);
  return found == ~0u ? found : static_cast<uint32_t>(sizeof(T) * 8 - 1 - found);
}
template <class T>
T mask(uint32_t length) {
  return length >= sizeof(T) * 8 ? static_cast<T>(~T(0)) : static_cast<T>((T(1) << length) - 1);
}
template <class T>
T bfi(T field, T into, uint32_t position, uint32_t length) {
  const T m = shl(mask<T>(length & 255), position & 255);
  return (into & ~m) | (shl(field, position & 255) & m);
}
template <class T>
T bfe(T a, uint32_t position, uint32_t length) {
  using U = std::make_unsigned_t<T>;
  constexpr uint32_t width = sizeof(T) * 8;
  position &= 255, length &= 255;
  if (length == 0) return 0;
  const U field = shr(static_cast<U>(a), position) & mask<U>(length);
  const bool negative = std::is_signed_v<T> && (a >> min(position + length - 1, width - 1) & 1);
  return static_cast<T>(negative ? field | ~mask<U>(min(length, width - min(position, width))) : field);
}
inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t r = 0;
  if (table & 0x01) r |= ~a & ~b & ~c;
  if (table & 0x02) r |= ~a & ~b & c;
  if (table & 0x04) r |= ~a & b & ~c;
  if (table & 0x08) r |= ~a & b & c;
  if (table & 0x10) r |= a & ~b & ~c;
  if (table & 0x20) r |= a & ~b & c;
  if (table & 0x40) r |= a & b & ~c;
  if (table & 0x80) r |= a & b & c;
  return r;
}
// Each nibble of `selector` picks a byte of {b, a}; its top bit replicates the byte's sign.
inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  const uint64_t both = static_cast<uint64_t>(b) << 32 | a;
  uint32_t r = 0;
  for (int i = 0; i < 4; ++i) {
    const uint32_t s = selector >> i * 4;
    const uint32_t byte = static_cast<uint32_t>(both >> (s & 7) * 8 & 255);
    r |= (s & 8 ? (byte & 128 ? 255u : 0u) : byte) << i * 8;
  }
  return r;
}
// Funnel shifts of {b, a}.
inline uint32_t shf_l(uint32_t a, uint32_t b, uint32_t n) {
  return static_cast<uint32_t>((static_cast<uint64_t>(b) << 32 | a) << n >> 32);
}
inline uint32_t shf_r(uint32_t a, uint32_t b, uint32_t n) {
  return static_cast<uint32_t>((static_cast<uint64_t>(b) << 32 | a) >> n);
}

// ---- functions that a GPU approximates; the last digits differ from it
inline float ex2(float a) { return std::exp2(a); }
inline float lg2(float a) { return std::log2(a); }
inline float sin(float a) { return std::sin(a); }
inline float cos(float a) { return std::cos(a); }
inline float tanh(float a) { return std::tanh(a); }
template <class T>
T rcp(T a) { return 1 / a; }
template <class T>
T sqrt(T a) { return std::sqrt(a); }
template <class T>
T rsqrt(T a) { return 1 / std::sqrt(a); }

// ---- conversions
template <class T>
T round_integral(T a, int mode) {
  switch (mode) {
    case FE_TOWARDZERO: return std::trunc(a);
    case FE_DOWNWARD: return std::floor(a);
    case FE_UPWARD: return std::ceil(a);
    default: return std::nearbyint(a);
  }
}
// Rounds, clamps to the integer's range; NaN becomes 0.
template <class To, class From>
To to_integer(From a, int mode) {
  if (a != a) return 0;
  const From rounded = round_integral(a, mode);
  if (rounded <= static_cast<From>(std::numeric_limits<To>::min())) return std::numeric_limits<To>::min();
  if (rounded >= static_cast<From>(std::numeric_limits<To>::max())) return std::numeric_limits<To>::max();
  return static_cast<To>(rounded);
}
template <class To, class From>
To clamp_integer(From a) {
  if constexpr (std::is_signed_v<From>) {
    if (a < 0) {
      if (!std::is_signed_v<To>) return 0;
      return static_cast<int64_t>(a) < static_cast<int64_t>(std::numeric_limits<To>::min())
                 ? std::numeric_limits<To>::min() : static_cast<To>(a);
    }
  }
  return static_cast<uint64_t>(a) > static_cast<uint64_t>(std::numeric_limits<To>::max())
             ? std::numeric_limits<To>::max() : static_cast<To>(a);
}

}  // namespace ptx
