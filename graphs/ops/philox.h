// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), one counter per lane.
//
// A counter-based generator: 128 bits of counter and 64 of key give 128 random bits, without state.
#pragma once

#include "simd_words.h"

namespace chairlift::CHAIRLIFT_SIMD_NS {

constexpr int kPhiloxRounds = 10;

// The key of every round, ready to use.
struct PhiloxKey {
  uint32_t rounds[kPhiloxRounds][2];
};

CHAIRLIFT_INLINE PhiloxKey philox_key(uint64_t seed) {
  PhiloxKey key;
  uint32_t low = static_cast<uint32_t>(seed);
  uint32_t high = static_cast<uint32_t>(seed >> 32);
  for (int i = 0; i < kPhiloxRounds; ++i) {
    key.rounds[i][0] = low;
    key.rounds[i][1] = high;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
  return key;
}

// Counters (quad, position, 0, 0), one per lane of `quad`, to the four random words of each: `out[i]` holds every
// lane's word i.
CHAIRLIFT_INLINE void philox(const PhiloxKey& key, Words quad, uint32_t position, Words out[4]) {
  const Words multiplier0 = words(0xD2511F53u);
  const Words multiplier1 = words(0xCD9E8D57u);
  Words c0 = quad;
  Words c1 = words(position);
  Words c2 = words(0);
  Words c3 = words(0);
  for (int i = 0; i < kPhiloxRounds; ++i) {
    Words high0, low0, high1, low1;
    mul_wide(c0, multiplier0, &high0, &low0);
    mul_wide(c2, multiplier1, &high1, &low1);
    c0 = xor_words(xor_words(high1, c1), words(key.rounds[i][0]));
    c2 = xor_words(xor_words(high0, c3), words(key.rounds[i][1]));
    c1 = low1;
    c3 = low0;
  }
  out[0] = c0;
  out[1] = c1;
  out[2] = c2;
  out[3] = c3;
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
