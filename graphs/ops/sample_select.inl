// Finding thresholds in a row of logits without sorting it. Part of sample_kernel.inl.
#pragma once

#include "simd.h"
#include "simd_words.h"

namespace chairlift::CHAIRLIFT_SIMD_NS {
namespace {

constexpr float kInfinity = __builtin_inff();
constexpr float kLowestFinite = -0x1.fffffep127f;
constexpr float kSmallestNormal = 0x1p-126f;
constexpr uint32_t kAllLanes = (1u << kLanes) - 1u;

// Logits are worked on in chunks. The last one is a copy filled up with -inf, so that every chunk is whole.
constexpr int kChunk = 256;

constexpr int64_t num_chunks_of(int64_t size) { return (size + kChunk - 1) / kChunk; }

CHAIRLIFT_INLINE uint32_t at_least_mask(Vec v, Vec bound) { return ~less_mask(v, bound) & kAllLanes; }

// One row of logits and its z = (logit - largest) / temperature.
class Row {
 public:
  // `tail` [kChunk] is for the copy, `lane_maxima` [num_chunks * kLanes] for the largest logit of each lane of each
  // chunk. Reads the row.
  Row(const float* logits, int64_t size, float* tail, float* lane_maxima)
      : logits_(logits),
        tail_(tail),
        maxima_(lane_maxima),
        num_chunks_(num_chunks_of(size)),
        num_whole_(size / kChunk) {
    if (num_whole_ < num_chunks_) {
      for (int i = 0; i < kChunk; i += kLanes) store(tail + i, set1(-kInfinity));
      std::memcpy(tail, logits + num_whole_ * kChunk, static_cast<size_t>(size % kChunk) * sizeof(float));
    }
    scan(lane_maxima);
  }

  int64_t num_chunks() const { return num_chunks_; }
  const float* chunk(int64_t c) const { return c < num_whole_ ? logits_ + c * kChunk : tail_; }
  const float* lane_maxima(int64_t c) const { return maxima_ + c * kLanes; }

  // NaN or +inf if the row holds one of them.
  float largest() const { return largest_; }

  int32_t first_largest() const {
    const Vec wanted = set1(largest_);
    int64_t c = 0;
    while (at_least_mask(load(lane_maxima(c)), wanted) == 0) ++c;
    int i = 0;
    while (at_least_mask(load(chunk(c) + i), wanted) == 0) i += kLanes;
    return static_cast<int32_t>(c * kChunk + i + __builtin_ctz(at_least_mask(load(chunk(c) + i), wanted)));
  }

  void set_temperature(float temperature) { inverse_ = 1.0f / temperature; }

  // z of kLanes logits. It grows with the logit, so lane maxima may stand for their lanes.
  __attribute__((always_inline)) Vec z(const float* logits) const {
    return mul(sub(load(logits), set1(largest_)), set1(inverse_));
  }
  float z_of(int32_t token) const { return (logits_[token] - largest_) * inverse_; }

  // Whether a token of the chunk has z >= bound.
  __attribute__((always_inline)) bool reaches(int64_t c, float bound) const {
    return at_least_mask(z(lane_maxima(c)), set1(bound)) != 0;
  }

 private:
  void scan(float* lane_maxima) {
    const Vec infinity = set1(kInfinity);
    Vec largest = set1(-kInfinity);
    for (int64_t c = 0; c < num_chunks_; ++c) {
      const float* logits = chunk(c);
      Vec a = set1(-kInfinity);
      Vec b = a;
      for (int i = 0; i < kChunk; i += 2 * kLanes) {
        a = max(a, min(load(logits + i), infinity));  // min(NaN, inf) is inf; on NEON it is NaN, and max keeps that
        b = max(b, min(load(logits + i + kLanes), infinity));
      }
      a = max(a, b);
      store(lane_maxima + c * kLanes, a);
      largest = max(largest, a);
    }
    largest_ = reduce_max(largest);
  }

  const float* logits_;
  const float* tail_;
  const float* maxima_;
  int64_t num_chunks_;
  int64_t num_whole_;
  float largest_ = 0.0f;
  float inverse_ = 1.0f;
};

// What a candidate weighs: one, or its own value, which is a probability mass then (above 0).
enum class Weight { one, value };

// Values of which one is the threshold. Room for 2 * kLanes more than the largest count.
struct Candidates {
  float* values;
  int64_t count;

  __attribute__((always_inline)) void append(Vec v, uint32_t mask) {
    pack_store(values + count, v, mask);
    count += __builtin_popcount(mask);
  }
};

struct Range {
  float low;
  float high;
};

// Of a list with at least kLanes candidates.
Range range_of(const Candidates& list) {
  Vec low = load(list.values + list.count - kLanes);
  Vec high = low;
  for (int64_t i = 0; i + kLanes <= list.count; i += kLanes) {
    const Vec v = load(list.values + i);
    low = min(low, v);
    high = max(high, v);
  }
  return {reduce_min(low), reduce_max(high)};
}

template <Weight weight>
double weight_above(const Candidates& list, float pivot) {
  const Vec limit = set1(pivot);
  const Vec one = set1(1.0f);
  double total = 0.0;
  int64_t i = 0;
  while (i + kLanes <= list.count) {
    Vec sum = zero();
    for (const int64_t end = i + kChunk; i < end && i + kLanes <= list.count; i += kLanes) {
      const Vec v = load(list.values + i);
      sum = add(sum, select_less(limit, v, weight == Weight::one ? one : v, zero()));
    }
    total += static_cast<double>(reduce_add(sum));
  }
  for (; i < list.count; ++i) {
    const float v = list.values[i];
    if (v > pivot) total += weight == Weight::one ? 1.0 : static_cast<double>(v);
  }
  return total;
}

// Keeps the candidates above `pivot`, or the others.
void keep_side(Candidates* list, float pivot, bool is_above) {
  const Vec limit = set1(pivot);
  const uint32_t flip = is_above ? 0u : kAllLanes;
  const int64_t count = list->count;
  list->count = 0;
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vec v = load(list->values + i);
    const uint32_t present = count - i >= kLanes ? kAllLanes : (1u << (count - i)) - 1u;
    list->append(v, (less_mask(limit, v) ^ flip) & present);  // never writes beyond what has been read
  }
}

template <Weight weight>
float threshold_of_few(const Candidates& list, double weight_before, double target) {
  float* values = list.values;
  for (int64_t i = 1; i < list.count; ++i) {
    const float value = values[i];
    int64_t j = i;
    for (; j > 0 && values[j - 1] < value; --j) values[j] = values[j - 1];
    values[j] = value;
  }
  int64_t last = 0;
  for (int64_t i = 0; i < list.count; ++i) {
    if (values[i] != values[last] && weight_before >= target) break;
    if (values[i] != values[last] || i == 0) last = i;
    weight_before += weight == Weight::one ? 1.0 : static_cast<double>(values[i]);
  }
  return values[last];
}

// The lowest candidate such that the candidates above it weigh less than `target`, which is above 0. Consumes the list,
// which is not empty. Bisects between the extremes: a few passes over a list that shrinks each time.
template <Weight weight>
float threshold(Candidates* list, double target) {
  constexpr int64_t kFew = 24;
  static_assert(kFew >= kLanes, "range_of needs a whole vector");
  double weight_before = 0.0;  // of the candidates dropped from above; less than the target
  while (list->count > kFew) {
    const Range range = range_of(*list);
    if (range.low == range.high) return range.low;
    float pivot = weight == Weight::one ? range.low + (range.high - range.low) * 0.5f
                                        : __builtin_sqrtf(range.low) * __builtin_sqrtf(range.high);
    if (!(pivot >= range.low && pivot < range.high)) pivot = range.low;
    const double above = weight_above<weight>(*list, pivot);
    const bool is_above = weight_before + above >= target;
    if (!is_above) weight_before += above;
    keep_side(list, pivot, is_above);
  }
  return threshold_of_few<weight>(*list, weight_before, target);
}

}  // namespace
}  // namespace chairlift::CHAIRLIFT_SIMD_NS
