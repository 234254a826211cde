// A threshold in a row of logits without sorting it: a radix search in three rounds of histograms.
//
// A token's key is -z * 2^25 as an integer, z = (logit - largest) / temperature: 0 for the likeliest, linear in z, so
// that the logits of a language model spread over some hundred bins of the first round where the bits of a float would
// fall into a dozen. Scaled logits closer than 2^-25 are tied, which is less than their masses differ by in float32.
//
// Bins are 64-bit numbers in two halves, added to by 32-bit atomics: shared memory has no 64-bit addition, only a loop
// of compare-and-swap. The order of integer additions does not matter, so the result does not depend on timing.
#pragma once

#include "logits_row.cuh"

constexpr float kKeyScale = 0x1p25f;
constexpr float kLowest = -87.0f;  // e^z of anything lower counts as 0
constexpr int kMaxBins = 2 * kThreads;

DEVICE u32 key_of(float z) {
  u32 key;
  asm("cvt.rzi.u32.f32 %0, %1;" : "=r"(key) : "f"(-z * kKeyScale));  // saturates
  return key;
}

template <class Logit>
struct ScaledRow {
  LogitsRow<Logit> row;
  float largest;
  float inverse_temperature;

  DEVICE float z_of(float logit) const { return __fmul_rn(__fsub_rn(logit, largest), inverse_temperature); }
};

struct SelectMemory {
  u32 low[kMaxBins];
  u32 high[kMaxBins];
  u64 of_warps[kWarps];
  u64 before;  // what the bins before the one that was found hold
  u32 found;
};

// What is searched for: the lowest key up to which the tokens weigh at least a target. Both searches are one piece of
// code, and which one it is a value, since the code of a search is large.
struct Search {
  bool is_mass;  // a token weighs its mass in units of 2^-40, else one
  u32 count;     // the target
  float share;   // the target as a share of the mass of all

  DEVICE static Search of_count(int count) { return {false, static_cast<u32>(count), 0.0f}; }
  DEVICE static Search of_mass(float share) { return {true, 0, share}; }

  DEVICE void add(float z, u32 bin, SelectMemory* memory) const {
    const u64 weight = is_mass ? static_cast<u64>(exp2_approx(z * 1.44269504f) * 0x1p40f) : 1;
    if (weight == 0) return;
    const u32 low = static_cast<u32>(weight);
    const u32 before = atomicAdd(&memory->low[bin], low);
    const u32 high = static_cast<u32>(weight >> 32) + (before + low < before ? 1u : 0u);
    if (high > 0) atomicAdd(&memory->high[bin], high);
  }

  DEVICE u64 target(u64 total) const {
    if (!is_mass) return count;
    const u64 numerator = static_cast<u64>(share * 0x1p24f);
    const u64 wanted = (total >> 24) * numerator + ((total & 0xffffffu) * numerator >> 24);
    return wanted > 0 ? wanted : 1;
  }
};

// Finds the first bin at which the running sum reaches a target, which `target_of(total)` gives and which is returned.
// A thread takes two neighbouring bins. Leaves the result in `memory`.
template <class TargetOf>
DEVICE u64 find_bin(SelectMemory* memory, const TargetOf& target_of) {
  const int bin = 2 * threadIdx.x;
  const u64 first = static_cast<u64>(memory->high[bin]) << 32 | memory->low[bin];
  const u64 second = static_cast<u64>(memory->high[bin + 1]) << 32 | memory->low[bin + 1];
  u64 sum = first + second;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u64 before = __shfl_up_sync(kWholeWarp, sum, distance);
    if (lane_of_thread() >= distance) sum += before;
  }
  if (lane_of_thread() == 31) memory->of_warps[warp_of_thread()] = sum;
  __syncthreads();
  u64 total = 0;
  u64 before = sum - first - second;
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < warp_of_thread()) before += memory->of_warps[warp];
    total += memory->of_warps[warp];
  }
  const u64 target = target_of(total);
  if (before < target && target <= before + first + second) {
    const bool is_first = target <= before + first;
    memory->found = bin + (is_first ? 0 : 1);
    memory->before = is_first ? before : before + first;
  }
  __syncthreads();
  return target;
}

// The key that is searched for. Tokens beyond `last_key` do not take part.
template <class Logit>
DEVICE u32 select_key(const ScaledRow<Logit>& scaled, u32 last_key, const Search& search, SelectMemory* memory) {
  u32 prefix = 0;
  u64 target = 0;
#pragma unroll 1
  for (int round = 0; round < 3; ++round) {
    const int shift = round == 0 ? 21 : round == 1 ? 10 : 0;
    const int bits = round == 2 ? 10 : 11;
    for (int i = threadIdx.x; i < kMaxBins; i += kThreads) memory->low[i] = memory->high[i] = 0;
    __syncthreads();
    scaled.row.template for_quads<1>([&](int quad, const float (&values)[4]) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float z = scaled.z_of(values[i]);
        const u32 key = key_of(z);
        const bool is_here = round == 0 || key >> (shift + bits) == prefix;
        if (!is_here || key > last_key || 4 * quad + i >= scaled.row.vocab_size) continue;
        search.add(z, key >> shift & ((1u << bits) - 1), memory);
      }
    });
    __syncthreads();
    target = find_bin(memory, [&](u64 total) { return round == 0 ? search.target(total) : target; });
    target -= memory->before;  // which find_bin has left there
    prefix = prefix << bits | memory->found;
    __syncthreads();
  }
  return prefix;
}
