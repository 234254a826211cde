// Logits under a block of threads, eight neighbours ("an octet") a thread and so many in a slice: loops over a row or a
// part of it, slice by slice, and reductions over the block.
#pragma once

#include "scalar.cuh"

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kOctet = 8;
constexpr int kSliceLogits = kOctet * kThreads;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);
constexpr float kLog2E = 1.44269504f;

// A number and the token it belongs to. Of equal numbers the lower token is the better one.
struct Candidate {
  float value;
  int token;

  DEVICE bool beats(const Candidate& other) const {
    return value > other.value || (value == other.value && token < other.token);
  }
};

constexpr int kNoToken = 0x7fffffff;
constexpr Candidate kBeforeAll = {kInfinity, -1};

DEVICE Candidate shuffled(const Candidate& mine, int distance) {
  return {__shfl_xor_sync(kWholeWarp, mine.value, distance), __shfl_xor_sync(kWholeWarp, mine.token, distance)};
}
DEVICE float shuffled(float mine, int distance) { return __shfl_xor_sync(kWholeWarp, mine, distance); }

DEVICE Candidate joined(const Candidate& a, const Candidate& b) { return a.beats(b) ? a : b; }
DEVICE float joined(float a, float b) { return a + b; }

constexpr int kReduceBytes = kWarps * 16;  // room for one value a warp

// The best candidate, or the sum, of all threads: the same in every thread, and always in the same order. `memory`:
// kReduceBytes.
template <class Value>
DEVICE Value reduce_block(Value value, void* memory) {
  Value* of_warps = static_cast<Value*>(memory);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value = joined(value, shuffled(value, distance));
  if (lane_of_thread() == 0) of_warps[warp_of_thread()] = value;
  __syncthreads();
  value = of_warps[lane_of_thread() % kWarps];
#pragma unroll
  for (int distance = kWarps / 2; distance > 0; distance /= 2) value = joined(value, shuffled(value, distance));
  __syncthreads();
  return value;
}

template <class Logit>
struct LogitsRow {
  Logit* logits;
  int vocab_size;

  DEVICE float at(int token) const { return to_float(logits[token]); }

  // Neighbours from 8 * octet on, -inf beyond the last: in loads of 16 bytes where the row begins on a multiple of 16,
  // as all rows do if `vocab_size` is a multiple of 8. Otherwise one by one: the bytes come from memory once all the
  // same, since a warp's loads meet in the L1 cache.
  DEVICE void load(int octet, float (&values)[kOctet]) const {
    const int first = kOctet * octet;
    if (reinterpret_cast<u64>(logits) % 16 == 0 && first + kOctet <= vocab_size) {
      const uint4* words = reinterpret_cast<const uint4*>(logits + first);
      constexpr int kInLoad = 16 / sizeof(Logit);
#pragma unroll
      for (int i = 0; i < kOctet / kInLoad; ++i) unpack(words[i], values + i * kInLoad);
    } else {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) values[i] = first + i < vocab_size ? at(first + i) : -kInfinity;
    }
  }

 private:
  DEVICE static void unpack(const uint4& words, float* values) {
    const u32 each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (sizeof(Logit) == 4) {
        values[i] = __uint_as_float(each[i]);
      } else {
        values[2 * i] = first_of<Logit>(each[i]);
        values[2 * i + 1] = second_of<Logit>(each[i]);
      }
    }
  }
};

// Logits from `begin` on, which is a multiple of kSliceLogits, to `end`, which is one too or the row's.
template <class Logit>
struct LogitsPart {
  LogitsRow<Logit> row;
  int begin;
  int end;

  DEVICE static LogitsPart all_of(const LogitsRow<Logit>& row) { return {row, 0, row.vocab_size}; }

  // body(octet, values) for this thread's octets. Every thread makes the same number of calls, so the body may
  // synchronise its warp; what is beyond the row is -inf. `kUnroll` loads are on their way at a time.
  template <int kUnroll, class Body>
  DEVICE void for_octets(const Body& body) const {
#pragma unroll kUnroll
    for (int start = begin; start < end; start += kSliceLogits) {
      float values[kOctet];
      const int octet = start / kOctet + static_cast<int>(threadIdx.x);
      row.load(octet, values);
      body(octet, values);
    }
  }

  // The best logit after `previous`; NaN counts as +inf. No token if there is none.
  DEVICE Candidate best_after(const Candidate& previous, void* memory) const {
    Candidate best = {-kInfinity, kNoToken};
    for_octets<2>([&](int octet, const float (&values)[kOctet]) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const Candidate mine = {values[i] < kInfinity ? values[i] : kInfinity, kOctet * octet + i};
        if (mine.token < row.vocab_size && previous.beats(mine) && mine.beats(best)) best = mine;
      }
    });
    return reduce_block(best, memory);
  }

  // The sum of e^(logit - largest).
  DEVICE float mass(float largest, void* memory) const {
    float total = 0.0f;
    for_octets<1>([&](int, const float (&values)[kOctet]) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) total += exp2_approx((values[i] - largest) * kLog2E);
    });
    return reduce_block(total, memory);
  }
};
