// The token with the largest z + Gumbel noise, which draws tokens by their masses. The noise of a token comes from a
// counter, so it does not depend on which thread computes it, and is the same on the CPU.
#pragma once

#include "sample_select.cuh"

// Of 24 random bits: -log(-log(u)) for u from 2^-25 to 1 - 2^-25.
constexpr float kLeastNoise = -2.86f;
constexpr float kLargestNoise = 17.34f;

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

// 1 - u, u = ((bits >> 8) + 0.5) / 2^24; exact if below a half.
DEVICE float rest_of_uniform(u32 bits) { return (static_cast<float>(~bits >> 8) + 0.5f) * 0x1p-24f; }

// -log(-log(u)), to float32's last digits also where u is close to 1.
DEVICE float noise(u32 bits) {
  const float u = (static_cast<float>(bits >> 8) + 0.5f) * 0x1p-24f;
  const float rest = rest_of_uniform(bits);
  return -logf(rest < 0.5f ? -log1pf(-rest) : -logf(u));
}

// The logarithm to base 2, off by 2^-22; by that part of it beyond 2 and below a half.
DEVICE float log2_approx(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// The noise in a dozen instructions, off by less than kRoughness.
constexpr float kRoughness = 0.045f;
DEVICE float rough_noise(u32 bits) {
  const float rest = rest_of_uniform(bits);
  const float series = rest * (1.0f + rest * (0.5f + rest * (1.0f / 3)));  // of -log(1 - rest)
  const float exponential = rest < 0.5f ? series : -0.693147181f * log2_approx(fmaxf(1.0f - rest, 0x1p-25f));
  return -0.693147181f * log2_approx(exponential);
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

// The best score, and of the other tokens' scores the best one.
struct Contender {
  Candidate best;
  float next;
};

constexpr Contender kNoContender = {{-kInfinity, kNoToken}, -kInfinity};

DEVICE Contender shuffled(const Contender& mine, int distance) {
  return {shuffled(mine.best, distance), shuffled(mine.next, distance)};
}
DEVICE Contender joined(const Contender& a, const Contender& b) {
  const bool is_first = a.best.beats(b.best);
  return {is_first ? a.best : b.best, fmaxf(fmaxf(a.next, b.next), is_first ? b.best.value : a.best.value)};
}

// Among tokens up to `last_key`. The one with the logit `scaled.largest` must be among them.
template <class Logit>
struct Race {
  ScaledRow<Logit> scaled;
  u32 last_key;
  u64 seed;
  u32 position;

  DEVICE float score_of(int token) const {
    const uint4 random = philox(seed, token / 4, position);
    const u32 low = token & 1 ? random.y : random.x;
    const u32 high = token & 1 ? random.w : random.z;
    return scaled.z_of(scaled.row.at(token)) + noise(token & 2 ? high : low);
  }

  // Few scores are computed: tokens are ruled out by rough ones, which leave the winner's close rivals in, within 0.01
  // at least.
  DEVICE Contender run(const LogitsPart<Logit>& part, void* memory) const {
    Contender mine = kNoContender;
    float best_of_warp = -kInfinity;  // of rough scores
    part.template for_octets<1>([&](int octet, const float (&values)[kOctet]) {
      float rough[kOctet];
      rough_scores(octet, values, rough);
      float most = rough[0];
#pragma unroll
      for (int i = 1; i < kOctet; ++i) most = fmaxf(most, rough[i]);
      best_of_warp = fmaxf(best_of_warp, warp_max(most));
      u32 rivals = 0;
#pragma unroll
      for (int i = 0; i < kOctet; ++i) {
        const bool is_rival = rough[i] > -kInfinity && rough[i] >= best_of_warp - (2 * kRoughness + 0.01f);
        rivals |= is_rival ? 1u << i : 0u;
      }
#pragma unroll 1
      for (int token = kOctet * octet; rivals != 0; ++token, rivals >>= 1) {
        if (rivals & 1) mine = joined(mine, {{score_of(token), token}, -kInfinity});
      }
    });
    return reduce_block(mine, memory);
  }

  DEVICE int winner_of_list(const u32* tokens, int num_tokens, void* memory) const {
    Contender mine = kNoContender;
#pragma unroll 1
    for (int i = threadIdx.x; i < num_tokens; i += kThreads) {
      const int token = static_cast<int>(tokens[i]);
      if (key_of(scaled.z_of(scaled.row.at(token))) > last_key) continue;
      mine = joined(mine, {{score_of(token), token}, -kInfinity});
    }
    return reduce_block(mine, memory).best.token;
  }

 private:
  // -inf of tokens that take no part, or have no chance.
  DEVICE void rough_scores(int octet, const float (&values)[kOctet], float (&rough)[kOctet]) const {
#pragma unroll
    for (int quad = 0; quad < kOctet / 4; ++quad) {
      bool is_running = false;
#pragma unroll
      for (int i = 4 * quad; i < 4 * quad + 4; ++i) {
        const float z = scaled.z_of(values[i]);
        const bool runs = key_of(z) <= last_key && z >= kLeastNoise - kLargestNoise &&
                          kOctet * octet + i < scaled.row.vocab_size;
        rough[i] = runs ? z : -kInfinity;
        is_running |= runs;
      }
      if (!is_running) continue;
      const uint4 random = philox(seed, kOctet / 4 * octet + quad, position);
      rough[4 * quad] += rough_noise(random.x);
      rough[4 * quad + 1] += rough_noise(random.y);
      rough[4 * quad + 2] += rough_noise(random.z);
      rough[4 * quad + 3] += rough_noise(random.w);
    }
  }
};
