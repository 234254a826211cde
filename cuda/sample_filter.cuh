// Which tokens top_k and top_p leave, from the histogram of a row's tokens where it says enough, and else from the
// tokens themselves: those up to the last bin that matters, if a block has room for them, or the row.
#pragma once

#include "sample_arguments.cuh"

// The tokens of a part into the row's histogram. `bins` is the block's own.
template <class Logit>
DEVICE void count_tokens(const ScaledRow<Logit>& scaled, const LogitsPart<Logit>& part, bool has_masses,
                         const RowWorkspace& row, Histogram* bins) {
  bins->clear();
  __syncthreads();
  const u32 lowest = key_of(kLowest);
  part.template for_octets<2>([&](int, const float (&values)[kOctet]) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const float z = scaled.z_of(values[i]);
      const u32 key = key_of(z);
      if (key > lowest) continue;
      atomicAdd(&bins->counts[key >> kFirstShift], 1u);
      if (has_masses) bins->add_mass(key >> kFirstShift, mass_of(z));
    }
  });
  __syncthreads();
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    if (bins->counts[bin] == 0) continue;
    atomicAdd(&row.counts[bin], bins->counts[bin]);
    if (has_masses) atomicAdd(&row.masses[bin], bins->mass(bin));
  }
}

// By bins of the row's histogram.
struct Cuts {
  int first_unsure;  // tokens before this bin are kept for sure
  int last;          // tokens behind this one do not matter
  u32 num_tokens;    // up to that
  u64 mass;          // that top_p leaves; 0: it depends on which tokens of a bin top_k leaves
};

// top_p is a share of the masses that top_k leaves: of all masses up to top_k's bin at most, of those before that bin
// at least. In between lies the bin of top_p.
DEVICE Cuts find_cuts(const RowWorkspace& row, const Params& params, SelectMemory* memory) {
  for (int bin = threadIdx.x; bin < kBins; bin += kThreads) {
    const u64 mass = row.masses[bin];
    memory->bins.counts[bin] = row.counts[bin];
    memory->bins.low[bin] = static_cast<u32>(mass);
    memory->bins.high[bin] = static_cast<u32>(mass >> 32);
  }
  __syncthreads();
  Cuts cuts = {kBins, kBins - 1, 0, 0};
  bool is_cut = false;  // by top_k
#pragma unroll 1
  for (int step = 0; step < 4; ++step) {  // top_k's bin, top_p's last possible one, its first, the number of tokens
    const bool is_mass = step == 1 || step == 2;
    const bool is_asked = step == 0   ? params.has_top_k
                          : step == 1 ? params.has_top_p
                          : step == 2 ? params.has_top_p && is_cut
                                      : true;
    if (!is_asked) continue;
    const Found found = find_bin(memory, is_mass, step == 2 ? cuts.last - 1 : cuts.last, [&](u64 total) {
      return is_mass ? share_of(total, params.top_p) : step == 0 ? static_cast<u64>(params.top_k) : 1;
    });
    if (step == 0) is_cut = found.bin < kBins;
    if (step < 2 && found.bin < kBins) cuts.first_unsure = found.bin;
    if (step == 1 && !is_cut) cuts.mass = found.target;
    if (step == 0 && is_cut || step == 1 && !is_cut) cuts.last = found.bin;
    if (step == 2) cuts.first_unsure = min(cuts.first_unsure, found.bin);
    if (step == 3) cuts.num_tokens = static_cast<u32>(found.total);
  }
  return cuts;
}

// What select_key takes: all tokens of a row, or listed ones.
template <class Logit>
struct RowTokens {
  const ScaledRow<Logit>& scaled;

  template <class Body>
  DEVICE void for_each(const Body& body) const {
    LogitsPart<Logit>::all_of(scaled.row).template for_octets<1>([&](int, const float (&values)[kOctet]) {
#pragma unroll
      for (int i = 0; i < kOctet; ++i) body(scaled.z_of(values[i]));
    });
  }
};

template <class Logit>
struct ListedTokens {
  const ScaledRow<Logit>& scaled;
  const u32* tokens;
  int num_tokens;

  template <class Body>
  DEVICE void for_each(const Body& body) const {
#pragma unroll 1
    for (int i = threadIdx.x; i < num_tokens; i += kThreads) {
      body(scaled.z_of(scaled.row.at(static_cast<int>(tokens[i]))));
    }
  }
};

// In any order. `num_listed` is shared by the block, and 0.
template <class Logit>
DEVICE void list_tokens(const ScaledRow<Logit>& scaled, int last_bin, u32* tokens, u32* num_listed) {
  const u32 lowest = key_of(kLowest);
  LogitsPart<Logit>::all_of(scaled.row).template for_octets<2>([&](int octet, const float (&values)[kOctet]) {
#pragma unroll
    for (int i = 0; i < kOctet; ++i) {
      const u32 key = key_of(scaled.z_of(values[i]));
      if (key <= lowest && key >> kFirstShift <= static_cast<u32>(last_bin)) {
        tokens[atomicAdd(num_listed, 1u)] = kOctet * octet + i;
      }
    }
  });
  __syncthreads();
}

// The last key that top_k and top_p keep.
template <class Tokens>
DEVICE u32 last_key_of(const Tokens& tokens, const Params& params, const Cuts& cuts, SelectMemory* memory) {
  u32 last_key = key_of(kLowest);
  // top_p is a share of what top_k leaves.
#pragma unroll 1
  for (int i = params.has_top_k ? 0 : 1; i < (params.has_top_p ? 2 : 1); ++i) {
    const Search search = i == 0 ? Search::of_number(params.top_k) : Search::of_mass(cuts.mass, params.top_p);
    last_key = select_key(tokens, last_key, search, memory);
  }
  return last_key;
}
