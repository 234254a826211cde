// Operations in which the lanes of a warp exchange registers.
#include "formats.h"
#include "rendezvous.h"

namespace sim {
namespace {

struct ShuffleLane {
  Shuffle mode;
  uint32_t value, b, c;
  const char* where;
  Shuffled out;
};

void shuffle_lanes(ShuffleLane* const (&lanes)[warp_size]) {
  for (int i = 0; i < warp_size; ++i) {
    if (!lanes[i]) continue;
    ShuffleLane& me = *lanes[i];
    // c: the clamp in bits 0 to 4, and in bits 8 to 12 the lane bits that a segment shares.
    const int distance = static_cast<int>(me.b & 31), clamp = static_cast<int>(me.c & 31);
    const int segment = static_cast<int>(me.c >> 8 & 31), first = i & segment, bound = first | (clamp & ~segment);
    int source = i;
    switch (me.mode) {
      case Shuffle::up: source = i - distance; break;
      case Shuffle::down: source = i + distance; break;
      case Shuffle::butterfly: source = i ^ distance; break;
      case Shuffle::index: source = first | (distance & ~segment); break;
    }
    me.out.in_range = me.mode == Shuffle::up ? source >= bound : source <= bound;
    if (!me.out.in_range) source = i;
    if (!lanes[source]) fail(me.where, "shfl: lane %d reads lane %d, which is outside the mask", i, source);
    me.out.value = lanes[source]->value;
  }
}

struct VoteLane {
  bool value;
  uint32_t ballot, mask;
};

void vote_lanes(VoteLane* const (&lanes)[warp_size]) {
  uint32_t ballot = 0, mask = 0;
  for (int i = 0; i < warp_size; ++i)
    if (lanes[i]) mask |= 1u << i, ballot |= static_cast<uint32_t>(lanes[i]->value) << i;
  for (VoteLane* lane : lanes)
    if (lane) lane->ballot = ballot, lane->mask = mask;
}

VoteLane vote(const char* where, const char* what, uint32_t mask, bool value) {
  VoteLane me{value, 0, 0};
  meet<VoteLane, vote_lanes>(where, what, mask, me);
  return me;
}

struct MatchLane {
  uint64_t value;
  uint32_t same, mask;
};

void match_lanes(MatchLane* const (&lanes)[warp_size]) {
  for (MatchLane* me : lanes) {
    if (!me) continue;
    me->same = me->mask = 0;
    for (int i = 0; i < warp_size; ++i) {
      if (!lanes[i]) continue;
      me->mask |= 1u << i;
      if (lanes[i]->value == me->value) me->same |= 1u << i;
    }
  }
}

struct FoldLane {
  Fold how;
  uint32_t value, out;
};

uint32_t fold_two(Fold how, uint32_t a, uint32_t b) {
  const int32_t x = static_cast<int32_t>(a), y = static_cast<int32_t>(b);
  switch (how) {
    case Fold::add: return a + b;
    case Fold::min: return a < b ? a : b;
    case Fold::max: return a < b ? b : a;
    case Fold::min_signed: return x < y ? a : b;
    case Fold::max_signed: return x < y ? b : a;
    case Fold::and_: return a & b;
    case Fold::or_: return a | b;
    case Fold::xor_: return a ^ b;
  }
  return 0;
}

void fold_lanes(FoldLane* const (&lanes)[warp_size]) {
  FoldLane* first = nullptr;
  uint32_t result = 0;
  for (FoldLane* lane : lanes) {
    if (!lane) continue;
    result = first ? fold_two(lane->how, result, lane->value) : lane->value;
    if (!first) first = lane;
  }
  for (FoldLane* lane : lanes)
    if (lane) lane->out = result;
}

struct AddressLane {
  uint64_t address;
  uint64_t* all;
};

void gather_lanes(AddressLane* const (&lanes)[warp_size]) {
  for (AddressLane* me : lanes)
    for (int i = 0; i < warp_size; ++i) me->all[i] = lanes[i]->address;
}

struct MmaLane {
  Narrow type;
  int inner;
  const uint32_t *a, *b;
  float* d;
};

float element(const MmaLane& lane, uint32_t pair, int is_high) {
  const uint16_t raw = static_cast<uint16_t>(pair >> is_high * 16);
  return lane.type == Narrow::f16 ? ptx::to_float(ptx::half{raw}) : ptx::to_float(ptx::bf16{raw});
}

// Sums in the order of k; tensor cores sum in an order and a precision of their own.
void multiply_lanes(MmaLane* const (&lanes)[warp_size]) {
  float a[16][16], b[16][8];
  const int inner = lanes[0]->inner;
  for (int lane = 0; lane < warp_size; ++lane) {
    const MmaLane& from = *lanes[lane];
    const int group = lane / 4, k = lane % 4 * 2;
    for (int half = 0; half < inner / 8; ++half) {
      for (int high = 0; high < 2; ++high) {
        a[group][half * 8 + k + high] = element(from, from.a[half * 2], high);
        a[group + 8][half * 8 + k + high] = element(from, from.a[half * 2 + 1], high);
        b[half * 8 + k + high][group] = element(from, from.b[half], high);
      }
    }
  }
  for (int lane = 0; lane < warp_size; ++lane) {
    for (int i = 0; i < 4; ++i) {
      const int row = lane / 4 + i / 2 * 8, column = lane % 4 * 2 + i % 2;
      float sum = lanes[lane]->d[i];
      for (int k = 0; k < inner; ++k) sum += a[row][k] * b[k][column];
      lanes[lane]->d[i] = sum;
    }
  }
}

}  // namespace

Shuffled shuffle(const char* where, Shuffle mode, uint32_t mask, uint32_t value, uint32_t b, uint32_t c) {
  ShuffleLane me{mode, value, b, c, where, {}};
  meet<ShuffleLane, shuffle_lanes>(where, "shfl.sync", mask, me);
  return me.out;
}

uint32_t ballot(const char* where, uint32_t mask, bool value) { return vote(where, "vote.ballot", mask, value).ballot; }

bool vote_all(const char* where, uint32_t mask, bool value) {
  const VoteLane me = vote(where, "vote.all", mask, value);
  return me.ballot == me.mask;
}

bool vote_any(const char* where, uint32_t mask, bool value) { return vote(where, "vote.any", mask, value).ballot != 0; }

bool vote_uniform(const char* where, uint32_t mask, bool value) {
  const VoteLane me = vote(where, "vote.uni", mask, value);
  return me.ballot == 0 || me.ballot == me.mask;
}

uint32_t match_any(const char* where, uint32_t mask, uint64_t value) {
  MatchLane me{value, 0, 0};
  meet<MatchLane, match_lanes>(where, "match.any", mask, me);
  return me.same;
}

Shuffled match_all(const char* where, uint32_t mask, uint64_t value) {
  MatchLane me{value, 0, 0};
  meet<MatchLane, match_lanes>(where, "match.all", mask, me);
  const bool is_all = me.same == me.mask;
  return {is_all ? me.mask : 0, is_all};
}

uint32_t fold(const char* where, Fold how, uint32_t mask, uint32_t value) {
  FoldLane me{how, value, 0};
  meet<FoldLane, fold_lanes>(where, "redux.sync", mask, me);
  return me.out;
}

void gather_addresses(const char* where, uint64_t address, uint64_t (&all)[32]) {
  AddressLane me{address, all};
  meet<AddressLane, gather_lanes>(where, "ldmatrix", full_warp(where, "ldmatrix"), me);
}

void mma(const char* where, Narrow type, int inner, float (&d)[4], const uint32_t* a, const uint32_t* b) {
  MmaLane me{type, inner, a, b, d};
  meet<MmaLane, multiply_lanes>(where, "mma.sync", full_warp(where, "mma.sync"), me);
}

}  // namespace sim
