// Thresholds in a row of logits without sorting it: histograms of keys.
//
// A token's key is -z * 2^25 as an integer, z = (logit - largest) / temperature: 0 for the likeliest, linear in z, so
// that the logits of a language model spread over some hundred bins of the first histogram where the bits of a float
// would fall into a dozen. Scaled logits closer than 2^-25 are tied, which is less than their masses differ by in
// float32. Tokens with z < kLowest never take part.
//
// Masses are 64-bit numbers in two halves, added to by 32-bit atomics: shared memory has no 64-bit addition, only a loop
// of compare-and-swap. The order of integer additions does not matter, so the result does not depend on timing, nor on
// how a row is divided between blocks.
#pragma once

#include "logits_part.cuh"

constexpr float kKeyScale = 0x1p25f;
constexpr float kLowest = -87.0f;  // e^z of anything lower counts as 0
constexpr int kBins = 2048;
constexpr int kFirstShift = 21;  // a bin of the first histogram: 1/16 of z

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

// In units of 2^-40.
DEVICE u64 mass_of(float z) { return static_cast<u64>(exp2_approx(z * kLog2E) * 0x1p40f); }

DEVICE u64 share_of(u64 total, float share) {
  const u64 numerator = static_cast<u64>(share * 0x1p24f);
  const u64 wanted = (total >> 24) * numerator + ((total & 0xffffffu) * numerator >> 24);
  return wanted > 0 ? wanted : 1;
}

// Numbers and masses of tokens by bins.
struct Histogram {
  u32 counts[kBins];
  u32 low[kBins];  // of masses
  u32 high[kBins];

  DEVICE void clear() {
    for (int i = threadIdx.x; i < kBins; i += kThreads) counts[i] = low[i] = high[i] = 0;
  }
  DEVICE void add_mass(u32 bin, u64 mass) {
    const u32 mass_low = static_cast<u32>(mass);
    const u32 before = atomicAdd(&low[bin], mass_low);
    const u32 mass_high = static_cast<u32>(mass >> 32) + (before + mass_low < before ? 1u : 0u);
    if (mass_high > 0) atomicAdd(&high[bin], mass_high);
  }
  DEVICE u64 mass(int bin) const { return static_cast<u64>(high[bin]) << 32 | low[bin]; }
};

struct Found {
  u64 total;   // of all bins that count
  u64 target;  // what the running sum was to reach
  u64 before;  // what the bins before the one that was found hold
  u32 bin;     // kBins if no running sum reaches the target
};

struct SelectMemory {
  Histogram bins;
  u64 of_warps[kWarps];
  u64 before;
  u32 found;
};

// The first bin at which the running sum of masses, or of counts, reaches the target that `target_of(total)` gives.
// Bins beyond `last_bin` count as empty.
template <class TargetOf>
DEVICE Found find_bin(SelectMemory* memory, bool is_mass, int last_bin, const TargetOf& target_of) {
  constexpr int kMine = kBins / kThreads;
  const int first_bin = kMine * threadIdx.x;
  u64 mine[kMine];
  u64 sum = 0;
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    const int bin = first_bin + i;
    mine[i] = bin > last_bin ? 0 : is_mass ? memory->bins.mass(bin) : memory->bins.counts[bin];
    sum += mine[i];
  }
  const u64 of_thread = sum;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const u64 before = __shfl_up_sync(kWholeWarp, sum, distance);
    if (lane_of_thread() >= distance) sum += before;
  }
  if (lane_of_thread() == 31) memory->of_warps[warp_of_thread()] = sum;
  if (threadIdx.x == 0) memory->found = kBins;
  __syncthreads();
  Found found = {};
  u64 before = sum - of_thread;
#pragma unroll 4
  for (int warp = 0; warp < kWarps; ++warp) {
    if (warp < warp_of_thread()) before += memory->of_warps[warp];
    found.total += memory->of_warps[warp];
  }
  found.target = target_of(found.total);
#pragma unroll
  for (int i = 0; i < kMine; ++i) {
    if (before < found.target && found.target <= before + mine[i]) {
      memory->found = first_bin + i;
      memory->before = before;
    }
    before += mine[i];
  }
  __syncthreads();
  found.bin = memory->found;
  found.before = memory->before;
  __syncthreads();
  return found;
}

// What is searched for: the lowest key up to which the tokens weigh at least a target. Both searches are one piece of
// code, and which one it is a value, since the code of a search is large.
struct Search {
  bool is_mass;  // a token weighs its mass, else one
  u64 target;    // 0: `share` of the mass of all that take part
  float share;

  DEVICE static Search of_number(u64 number) { return {false, number, 0.0f}; }
  DEVICE static Search of_mass(u64 mass, float share) { return {true, mass, share}; }
};

// The key that is searched for among the keys up to `last_key` of `tokens`, by radix in three rounds; `last_key` if they
// weigh less. `tokens.for_each(body)` calls body(z) for every token of this thread.
template <class Tokens>
DEVICE u32 select_key(const Tokens& tokens, u32 last_key, const Search& search, SelectMemory* memory) {
  u32 prefix = 0;
  u64 target = search.target;
#pragma unroll 1
  for (int round = 0; round < 3; ++round) {
    const int shift = round == 0 ? kFirstShift : round == 1 ? 10 : 0;
    const int bits = round == 2 ? 10 : 11;
    memory->bins.clear();
    __syncthreads();
    tokens.for_each([&](float z) {
      const u32 key = key_of(z);
      const bool is_here = round == 0 || key >> (shift + bits) == prefix;
      if (!is_here || key > last_key) return;
      const u32 bin = key >> shift & ((1u << bits) - 1);
      if (search.is_mass) {
        memory->bins.add_mass(bin, mass_of(z));
      } else {
        atomicAdd(&memory->bins.counts[bin], 1u);
      }
    });
    __syncthreads();
    const Found found = find_bin(memory, search.is_mass, kBins - 1,
                                 [&](u64 total) { return target > 0 ? target : share_of(total, search.share); });
    if (found.bin == kBins) return last_key;
    target = found.target - found.before;
    prefix = prefix << bits | found.bin;
  }
  return prefix;
}
