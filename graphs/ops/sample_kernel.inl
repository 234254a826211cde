// SampleRows, compiled once per instruction set: one token out of one row of logits.
//
//   1. One pass finds the largest logit, in all and of each lane of each chunk. Greedy rows are nearly done then.
//   2. z = (logit - largest) / temperature. top_k gives a lower bound on z, by selection and not by sorting: k lanes
//      whose maxima reach a value hold k tokens that do, so few candidates are left to search.
//   3. One pass stores the masses e^z of what is left. top_p and min_p give a lower bound on the mass. Tokens below
//      (1 - top_p) * total / vocab_size cannot be in the top_p set; the rest is searched by bisection.
//   4. token = argmax of z + gumbel over the tokens within both bounds. The noise comes from a counter-based generator
//      and most tokens are ruled out before it becomes a Gumbel number: -log(u) >= 1 - u, so a token can beat the best
//      score so far only if 1 - u < e^(z - best).
//
// Masses are added lane by lane in float32 within a chunk and chunk by chunk in float64, in token order; scores are
// float64. A row's token depends on the row alone.
#include <math.h>

#include "gumbel_race.inl"
#include "sample_kernel.h"
#include "sample_select.inl"

namespace chairlift::CHAIRLIFT_SIMD_NS {
namespace {

constexpr float kLowestMassive = -87.0f;  // e^z of anything lower counts as 0

// The masses e^z of the tokens with z >= z_bound, 0 for the others. Chunks without such a token are left out.
class Masses {
 public:
  // `memory` [num_chunks * kChunk].
  Masses(const Row& row, float z_bound, float* memory)
      : row_(row), z_bound_(z_bound > kLowestMassive ? z_bound : kLowestMassive), memory_(memory) {
    const Vec lowest = set1(z_bound_);
    for (int64_t c = 0; c < row.num_chunks(); ++c) {
      if (!row.reaches(c, z_bound_)) continue;
      const float* logits = row.chunk(c);
      float* out = memory + c * kChunk;
      Vec sum = zero();
      for (int i = 0; i < kChunk; i += kLanes) {
        const Vec z = row.z(logits + i);
        const Vec mass = select_less(z, lowest, zero(), exp_within(max(z, lowest)));
        store(out + i, mass);
        sum = add(sum, mass);
      }
      total_ += static_cast<double>(reduce_add(sum));
    }
  }

  double total() const { return total_; }
  const float* chunk(int64_t c) const { return memory_ + c * kChunk; }
  // False only if no token of the chunk has at least this z, which is not below z_bound.
  bool reaches(int64_t c, float z) const { return row_.reaches(c, z > z_bound_ ? z : z_bound_); }

  // The lowest mass such that the masses above it add up to less than top_p of all.
  float top_p_bound(float top_p, int64_t vocab_size, Candidates* list) const {
    // With some room, so that the errors of float32 leave out nothing.
    const double smallest = 0.99 * (1.0 - static_cast<double>(top_p)) * total_ / static_cast<double>(vocab_size);
    const Vec lowest = set1(static_cast<float>(smallest));
    list->count = 0;
    for (int64_t c = 0; c < row_.num_chunks(); ++c) {
      if (!reaches(c, z_bound_)) continue;
      for (int i = 0; i < kChunk; i += kLanes) {
        const Vec mass = load(chunk(c) + i);
        list->append(mass, less_mask(lowest, mass));
      }
    }
    const double target = static_cast<double>(top_p) * total_;
    return threshold<Weight::value>(list, target > 0.0 ? target : 0x1p-1000);
  }

 private:
  const Row& row_;
  float z_bound_;
  float* memory_;
  double total_ = 0.0;
};

// The token that wins among those with a mass of at least `mass_bound`.
int32_t race(const SampleRow& in, const Row& row, const Masses& masses, float mass_bound) {
  constexpr int kGroup = 4 * kLanes;
  const Vec lowest = set1(mass_bound);
  const float z_of_bound = static_cast<float>(::log(static_cast<double>(mass_bound)) - 0.01);
  GumbelRace gumbel(row, in.seed, in.position);
  for (int64_t c = 0; c < row.num_chunks(); ++c) {
    if (!masses.reaches(c, gumbel.z_floor() > z_of_bound ? gumbel.z_floor() : z_of_bound)) continue;
    for (int start = 0; start < kChunk; start += kGroup) {
      const float* group = masses.chunk(c) + start;
      uint32_t masks[4];
      int count = 0;
      for (int i = 0; i < 4; ++i) {
        masks[i] = at_least_mask(load(group + i * kLanes), lowest);
        count += __builtin_popcount(masks[i]);
      }
      const int32_t first = static_cast<int32_t>(c * kChunk + start);
      if (count > kLanes) {
        gumbel.run_dense(group, masks, first);
      } else if (count > 0) {
        gumbel.add_sparse(group, masks, first);
      }
    }
  }
  gumbel.run_waiting();
  return gumbel.winner();
}

// The k-th largest z, or the lowest finite number if fewer tokens have a finite one.
float top_k_bound(const Row& row, int32_t k, Candidates* list) {
  const Vec lowest = set1(kLowestFinite);
  list->count = 0;
  for (int64_t c = 0; c < row.num_chunks(); ++c) {
    const Vec z = row.z(row.lane_maxima(c));
    list->append(z, at_least_mask(z, lowest));
  }
  const double target = static_cast<double>(k);
  const float bound = list->count < k ? kLowestFinite : threshold<Weight::one>(list, target);
  list->count = 0;
  for (int64_t c = 0; c < row.num_chunks(); ++c) {
    if (!row.reaches(c, bound)) continue;
    for (int i = 0; i < kChunk; i += kLanes) {
      const Vec z = row.z(row.chunk(c) + i);
      list->append(z, at_least_mask(z, set1(bound)));
    }
  }
  return list->count <= k ? bound : threshold<Weight::one>(list, target);
}

// Sizes of the parts of the scratch, in floats.
struct Layout {
  int64_t maxima;
  int64_t masses;
  int64_t candidates;

  explicit Layout(int64_t vocab_size)
      : maxima(num_chunks_of(vocab_size) * kLanes),
        masses(num_chunks_of(vocab_size) * kChunk),
        candidates(masses + 2 * kLanes) {}
};

size_t scratch_bytes(int64_t vocab_size) {
  const Layout layout(vocab_size);
  return static_cast<size_t>(kChunk + layout.maxima + layout.masses + layout.candidates) * sizeof(float);
}

int32_t sample(const SampleRow& in, void* scratch) {
  const Layout layout(in.vocab_size);
  float* tail = static_cast<float*>(scratch);
  float* maxima = tail + kChunk;
  float* mass_memory = maxima + layout.maxima;
  Row row(in.logits, in.vocab_size, tail, maxima);
  if (!(row.largest() < kInfinity) || row.largest() == -kInfinity) return kNoUsableLogit;
  if (in.temperature < kSmallestNormal) return row.first_largest();

  row.set_temperature(in.temperature);
  Candidates list{mass_memory + layout.masses, 0};
  float z_bound = kLowestFinite;
  if (in.top_k > 0 && in.top_k < in.vocab_size) z_bound = top_k_bound(row, in.top_k, &list);
  float mass_bound = in.min_p > kSmallestNormal ? in.min_p : kSmallestNormal;
  if (in.top_p >= 1.0f) {  // then masses below the bound are not needed for a total
    const float z_of_bound = static_cast<float>(::log(static_cast<double>(mass_bound)) - 0.01);
    z_bound = z_of_bound > z_bound ? z_of_bound : z_bound;
  }
  const Masses masses(row, z_bound, mass_memory);
  if (in.top_p < 1.0f) {
    const float top_p_bound = masses.top_p_bound(in.top_p, in.vocab_size, &list);
    mass_bound = top_p_bound > mass_bound ? top_p_bound : mass_bound;
  }
  return race(in, row, masses, mass_bound);
}

}  // namespace

const SampleKernels& sample_kernels() {
  static constexpr SampleKernels kernels = {scratch_bytes, sample};
  return kernels;
}

}  // namespace chairlift::CHAIRLIFT_SIMD_NS
