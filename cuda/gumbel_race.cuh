// The token with the largest z + Gumbel noise, which draws tokens by their masses. The noise of a token comes from a
// counter, so it does not depend on which thread computes it, and is the same on the CPU.
#pragma once

#include "sample_select.cuh"

constexpr float kLargestNoise = 17.34f;  // of 24 random bits: -log(-log(1 - 2^-25)) = 17.33

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) of the counter
// (quad, position, 0, 0).
DEVICE uint4 philox(u64 seed, u32 quad, u32 position) {
  u32 key0 = static_cast<u32>(seed);
  u32 key1 = static_cast<u32>(seed >> 32);
  uint4 counter = {quad, position, 0, 0};
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const u64 product0 = static_cast<u64>(counter.x) * 0xD2511F53u;
    const u64 product1 = static_cast<u64>(counter.z) * 0xCD9E8D57u;
    counter = {static_cast<u32>(product1 >> 32) ^ counter.y ^ key0, static_cast<u32>(product1),
               static_cast<u32>(product0 >> 32) ^ counter.w ^ key1, static_cast<u32>(product0)};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// -log(u), u = ((bits >> 8) + 0.5) / 2^24, to float32's last digits also where u is close to 1.
DEVICE float exponential(u32 bits) {
  const float u = (static_cast<float>(bits >> 8) + 0.5f) * 0x1p-24f;
  const float rest = (static_cast<float>(~bits >> 8) + 0.5f) * 0x1p-24f;  // 1 - u; exact if below a half
  return rest < 0.5f ? -log1pf(-rest) : -logf(u);
}

// Order-preserving for numbers of either sign.
DEVICE u32 ordered_bits(float x) {
  const u32 bits = __float_as_uint(x);
  return bits ^ (static_cast<u32>(static_cast<int>(bits) >> 31) | 0x80000000u);
}
DEVICE float from_ordered_bits(u32 bits) { return __uint_as_float(bits >> 31 ? bits ^ 0x80000000u : ~bits); }

DEVICE float warp_max(float x) {
  u32 most;
  asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(most) : "r"(ordered_bits(x)));
  return from_ordered_bits(most);
}

// Among the tokens up to `last_key`. Most are ruled out before their noise costs a logarithm: -log(u) >= 1 - u, so a
// token can beat the best score so far, the warp's, only if 1 - u < e^(z - best).
template <class Logit>
DEVICE int race(const ScaledRow<Logit>& scaled, u32 last_key, u64 seed, u32 position, void* memory) {
  Candidate best = {-kInfinity, kNoToken};
  float best_of_warp = -kInfinity;
  scaled.row.template for_quads<1>([&](int quad, const float (&values)[4]) {
    float z[4];
    bool is_running[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      z[i] = scaled.z_of(values[i]);
      is_running[i] =
          key_of(z[i]) <= last_key && z[i] + kLargestNoise >= best_of_warp && 4 * quad + i < scaled.row.vocab_size;
    }
    if (is_running[0] || is_running[1] || is_running[2] || is_running[3]) {
      const uint4 random = philox(seed, quad, position);
      const u32 bits[4] = {random.x, random.y, random.z, random.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float rest = static_cast<float>(~bits[i] >> 8) * 0x1p-24f;
        // With room for the errors of float32.
        if (!is_running[i] || rest > exp2_approx((z[i] - best_of_warp) * 1.44269504f) * 1.001f) continue;
        const Candidate mine = {z[i] - logf(exponential(bits[i])), 4 * quad + i};
        if (mine.beats(best)) best = mine;
      }
    }
    best_of_warp = fmaxf(best_of_warp, warp_max(best.value));
  });
  return reduce_block(best, memory).token;
}
