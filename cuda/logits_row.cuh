// One row of logits under a block of threads: loops over it, and reductions over the block.
#pragma once

#include "scalar.cuh"

constexpr int kThreads = 1024;
constexpr int kWarps = kThreads / 32;
constexpr float kInfinity = __builtin_bit_cast(float, 0x7f800000);

// A number and the token it belongs to. Of equal numbers the lower token is the better one.
struct Candidate {
  float value;
  int token;

  DEVICE bool beats(const Candidate& other) const {
    return value > other.value || (value == other.value && token < other.token);
  }
};

constexpr int kNoToken = 0x7fffffff;

DEVICE Candidate shuffled(const Candidate& mine, int distance) {
  return {__shfl_xor_sync(kWholeWarp, mine.value, distance), __shfl_xor_sync(kWholeWarp, mine.token, distance)};
}
DEVICE float shuffled(float mine, int distance) { return __shfl_xor_sync(kWholeWarp, mine, distance); }

DEVICE Candidate joined(const Candidate& a, const Candidate& b) { return a.beats(b) ? a : b; }
DEVICE float joined(float a, float b) { return a + b; }

// The best candidate, or the sum, of all threads: the same in every thread, and always in the same order. `memory`:
// room for one value a warp.
template <class Value>
DEVICE Value reduce_block(Value value, void* memory) {
  Value* of_warps = static_cast<Value*>(memory);
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value = joined(value, shuffled(value, distance));
  if (lane_of_thread() == 0) of_warps[warp_of_thread()] = value;
  __syncthreads();
  value = of_warps[lane_of_thread()];
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value = joined(value, shuffled(value, distance));
  __syncthreads();
  return value;
}

template <class Logit>
struct LogitsRow {
  Logit* logits;
  int vocab_size;

  DEVICE float at(int token) const { return to_float(logits[token]); }

  // Four neighbours from 4 * quad on, -inf beyond the last; in one load if every row begins on a multiple of four.
  DEVICE void load(int quad, float (&values)[4]) const {
    struct alignas(4 * sizeof(Logit)) Four {
      Logit values[4];
    };
    const int first = 4 * quad;
    if (vocab_size % 4 == 0 && first < vocab_size) {
      const Four four = *reinterpret_cast<const Four*>(logits + first);
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = to_float(four.values[i]);
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) values[i] = first + i < vocab_size ? at(first + i) : -kInfinity;
    }
  }

  // body(quad, values) for this thread's quads. Every thread makes the same number of calls, so the body may
  // synchronise its warp; quads beyond the row hold -inf. `kUnroll` loads are on their way at a time.
  template <int kUnroll, class Body>
  DEVICE void for_quads(const Body& body) const {
    const int num_quads = (vocab_size + 3) / 4;
#pragma unroll kUnroll
    for (int start = 0; start < num_quads; start += kThreads) {
      float values[4];
      load(start + static_cast<int>(threadIdx.x), values);
      body(start + static_cast<int>(threadIdx.x), values);
    }
  }

  // The best logit after `previous`; NaN counts as +inf. No token if there is none.
  DEVICE Candidate best_after(const Candidate& previous, void* memory) const {
    Candidate best = {-kInfinity, kNoToken};
    for_quads<2>([&](int quad, const float (&values)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const Candidate mine = {values[i] < kInfinity ? values[i] : kInfinity, 4 * quad + i};
        if (mine.token < vocab_size && previous.beats(mine) && mine.beats(best)) best = mine;
      }
    });
    return reduce_block(best, memory);
  }
};
