// The fast Walsh-Hadamard transform of one row, and loops over the vectors of a row. Part of row_kernels.inl.
#pragma once

#include "row_kernels.h"
#include "simd.h"
#include "simd_words.h"

namespace chairlift::CHAIRLIFT_SIMD_NS {
namespace {

// Calls body(offset, lanes) for whole vectors and then for the rest; `lanes` is kLanes for whole vectors, so that the
// loads and stores below turn into unmasked ones there.
template <class Body>
CHAIRLIFT_INLINE void for_vectors(int64_t width, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i, kLanes);
  if (i < width) body(i, static_cast<int>(width - i));
}

// The same for bodies that may see a channel twice: the rest is a whole vector that overlaps the one before.
template <class Body>
CHAIRLIFT_INLINE void for_overlapping_vectors(int64_t width, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) body(i, kLanes);
  if (i == width) return;
  if (width >= kLanes) {
    body(width - kLanes, kLanes);
  } else {
    body(0, static_cast<int>(width));
  }
}

CHAIRLIFT_INLINE Vec load_lanes(const float* p, int lanes) {
  return lanes == kLanes ? load(p) : load_partial(p, lanes);
}
CHAIRLIFT_INLINE Words load_lanes(const int32_t* p, int lanes) {
  return lanes == kLanes ? load_words(p) : load_words_partial(p, lanes);
}
CHAIRLIFT_INLINE void store_lanes(float* p, Vec v, int lanes) {
  if (lanes == kLanes) {
    store(p, v);
  } else {
    store_partial(p, v, lanes);
  }
}

// The extremes of a row, 0 among them.
struct Range {
  Vec low = zero();
  Vec high = zero();
  Vec poison = zero();  // 0 * x is NaN for NaN and the infinities

  // n, a power of two, vectors at once, as a tree: one after the other, each of a row's would wait for the one before.
  template <int n>
  __attribute__((always_inline)) void include(const Vec (&v)[n]) {
    Vec lows[n], highs[n], poisons[n];
    for (int i = 0; i < n; ++i) {
      lows[i] = highs[i] = v[i];
      poisons[i] = mul(v[i], zero());
    }
    for (int half = n / 2; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) {
        lows[i] = min(lows[i], lows[i + half]);
        highs[i] = max(highs[i], highs[i + half]);
        poisons[i] = add(poisons[i], poisons[i + half]);
      }
    }
    low = min(lows[0], low);
    high = max(highs[0], high);
    poison = add(poisons[0], poison);
  }
};

// The Walsh-Hadamard transform of kRadix values.
template <int kRadix>
CHAIRLIFT_INLINE void transform(Vec v[kRadix]) {
  for (int half = kRadix / 2; half > 0; half /= 2) {
    for (int r = 0; r < kRadix; ++r) {
      if (r & half) continue;
      const Vec low = v[r];
      v[r] = add(low, v[r + half]);
      v[r + half] = sub(low, v[r + half]);
    }
  }
}

// log2(kRadix) stages of the transform of a row, the first ones: between runs of `inner` neighbouring channels, from
// what `produce(channel, lanes)` yields to what `consume(channel, inner, lanes, v)` takes, `inner` channels apart.
template <int kRadix, bool kIsRotated = true, class Produce, class Consume>
CHAIRLIFT_INLINE void first_stages(int64_t width, const Produce& produce, const Consume& consume) {
  const int64_t inner = width / kRadix;
  for_overlapping_vectors(inner, [&](int64_t i, int lanes) __attribute__((always_inline)) {
    Vec v[kRadix];
    for (int r = 0; r < kRadix; ++r) v[r] = produce(r * inner + i, lanes);
    if constexpr (kIsRotated) transform<kRadix>(v);
    consume(i, inner, lanes, v);
  });
}

// Further stages, in place, between runs of `inner` channels, at most kVectors vectors of them. Masked stores are slow:
// here whole vectors are stored, and what spills over into the next run is overwritten when that is stored. All runs of
// a group are loaded before. Runs shorter than half a vector would spill too far.
template <int kRadix, int kVectors>
CHAIRLIFT_INLINE Range narrow_stages(float* x, int64_t width, int64_t inner) {
  Range range;
  const int last_lanes = static_cast<int>(inner - (kVectors - 1) * kLanes);
  for (float* group = x; group < x + width; group += kRadix * inner) {
    Vec v[kVectors][kRadix];
    for (int j = 0; j < kVectors; ++j) {
      for (int r = 0; r < kRadix; ++r) v[j][r] = load(group + r * inner + j * kLanes);
      transform<kRadix>(v[j]);
    }
    for (int r = 0; r < kRadix; ++r) {
      for (int j = 0; j < kVectors; ++j) {
        const bool is_last = j == kVectors - 1;
        store_lanes(group + r * inner + j * kLanes, v[j][r], is_last && r == kRadix - 1 ? last_lanes : kLanes);
        if (is_last) v[j][r] = keep_lanes(v[j][r], last_lanes);
      }
    }
    for (int j = 0; j < kVectors; ++j) range.include(v[j]);
  }
  return range;
}

template <int kRadix>
CHAIRLIFT_INLINE Range wide_stages(float* x, int64_t width, int64_t inner) {
  Range range;
  for (float* group = x; group < x + width; group += kRadix * inner) {
    for_vectors(inner, [&](int64_t i, int lanes) __attribute__((always_inline)) {
      Vec v[kRadix];
      for (int r = 0; r < kRadix; ++r) v[r] = load_lanes(group + r * inner + i, lanes);
      transform<kRadix>(v);
      for (int r = 0; r < kRadix; ++r) store_lanes(group + r * inner + i, v[r], lanes);
      range.include(v);
    });
  }
  return range;
}

template <int kRadix>
Range stages(float* x, int64_t width, int64_t inner) {
  if (2 * inner < kLanes || inner > 2 * kLanes) return wide_stages<kRadix>(x, width, inner);
  return inner <= kLanes ? narrow_stages<kRadix, 1>(x, width, inner) : narrow_stages<kRadix, 2>(x, width, inner);
}

// The stages that are left of blocks of `rotation` > 1 strided channels, three at a time; the extremes of the result.
Range later_stages(float* x, int64_t width, int64_t inner, int64_t rotation) {
  for (; rotation > 8; rotation /= 8) {
    inner /= 8;
    stages<8>(x, width, inner);
  }
  if (rotation == 8) return stages<8>(x, width, inner / 8);
  if (rotation == 4) return stages<4>(x, width, inner / 4);
  return stages<2>(x, width, inner / 2);
}

// What the channels are multiplied by to make the transform orthogonal.
CHAIRLIFT_INLINE float rotation_factor(int64_t rotation) {
  return rotation == 0 ? 1.0f : static_cast<float>(1.0 / __builtin_sqrt(static_cast<double>(rotation)));
}

// Writes the produced channels, rotated but not normalised, into out.scratch: the fast Walsh-Hadamard transform of all
// strided blocks at once, which is one between runs of neighbouring channels, the furthest apart first.
template <class Produce>
CHAIRLIFT_INLINE Range rotate(const QuantizedRow& out, const Produce& produce) {
  Range range;
  const auto put = [&](int64_t i, int64_t inner, int lanes, const auto& v) __attribute__((always_inline)) {
    int64_t channel = i;
    for (const Vec& run : v) {
      store_lanes(out.scratch + channel, run, lanes);
      channel += inner;
    }
  };
  const auto put_last = [&](int64_t i, int64_t inner, int lanes, const auto& v) __attribute__((always_inline)) {
    put(i, inner, lanes, v);
    range.include(v);
  };
  if (out.rotation <= 1 && out.width % 4 == 0) {
    first_stages<4, false>(out.width, produce, put_last);
  } else if (out.rotation <= 1) {
    first_stages<1>(out.width, produce, put_last);
  }
  if (out.rotation == 2) first_stages<2>(out.width, produce, put_last);
  if (out.rotation == 4) first_stages<4>(out.width, produce, put_last);
  if (out.rotation == 8) first_stages<8>(out.width, produce, put_last);
  if (out.rotation <= 8) return range;
  first_stages<8>(out.width, produce, put);
  return later_stages(out.scratch, out.width, out.width / 8, out.rotation / 8);
}

}  // namespace
}  // namespace chairlift::CHAIRLIFT_SIMD_NS
