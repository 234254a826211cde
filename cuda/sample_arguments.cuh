// What the sampling kernels are given, all of them the same; README.md describes it. And what lies in their workspace.
#pragma once

#include "sample_select.cuh"

// By argument; SampleArguments has the same order.
#define SAMPLE_PARAMETERS                                                                                           \
  Logit *logits, const float *temperature, const int *top_k, const float *top_p, const float *min_p,                \
      const long long *seed, const int *position, const float *penalties, const int *edit_indptr,                   \
      const int *edit_tokens, const int *edit_counts, const float *edit_biases, float *edit_logits,                 \
      const int *mask_rows, const u32 *masks, const int *num_logprobs, int *token, float *logprob, int *top_tokens, \
      float *top_logprobs, u32 *workspace, int vocab_size, int max_top
#define SAMPLE_ARGUMENTS                                                                                         \
  {                                                                                                              \
    logits, temperature, top_k, top_p, min_p, seed, position, penalties, edit_indptr, edit_tokens, edit_counts,  \
        edit_biases, edit_logits, mask_rows, masks, num_logprobs, token, logprob, top_tokens, top_logprobs,      \
        workspace, vocab_size, max_top                                                                           \
  }

// How a row is sampled.
struct Params {
  float temperature;
  int top_k;
  float top_p;
  float min_p;
  u64 seed;
  u32 position;
  bool is_greedy;
  bool has_top_k;
  bool has_top_p;

  DEVICE bool has_search() const { return !is_greedy && (has_top_k || has_top_p); }

  // The last one that may be drawn, whatever the search says.
  DEVICE u32 last_key() const {
    const u32 lowest = key_of(kLowest);
    return min_p > 0.0f ? min(lowest, key_of(logf(min_p))) : lowest;
  }
};

// Of a block's part of a row: what the row's first block puts together.
struct PartResult {
  float model_largest;  // before edits and masks, where log-probabilities are asked for
  float model_total;    // of e^(logit - model_largest)
  Candidate likeliest;
  int winner;   // of the race between the part's tokens, or kNoToken
  float lead;   // of its score over the next best one's
};

// Of a row: what is left to sample_draw.
struct RowState {
  float largest;
  float log_total;  // subtracted from a logit it gives the log-probability
  int winner;       // of the race between all tokens; kNoToken: it is not known for sure
  u32 winner_key;
  bool is_open;     // the token is not chosen yet
};

// A row's part of the workspace, in words of 4 bytes. SAMPLE_... of service/executor/cuda/kernels.py has its size too.
constexpr int kStateWords = 8;
constexpr int kPartWords = 6;
static_assert(sizeof(RowState) <= 4 * kStateWords && sizeof(PartResult) == 4 * kPartWords, "as they are laid out");

struct RowWorkspace {
  u64* masses;     // [kBins] of all tokens' z
  u32* counts;     // [kBins]
  RowState* state;
  PartResult* parts;  // [num_parts], at most one a slice
  Candidate* tops;    // [num_parts, max_top] likeliest tokens of each part, before edits and masks
};

struct SampleArguments {
  using Logit = LOGIT;

  Logit* logits;
  const float* temperature;
  const int* top_k;
  const float* top_p;
  const float* min_p;
  const long long* seed;
  const int* position;
  const float* penalties;
  const int* edit_indptr;
  const int* edit_tokens;
  const int* edit_counts;
  const float* edit_biases;
  float* edit_logits;
  const int* mask_rows;
  const u32* masks;
  const int* num_logprobs;
  int* token;
  float* logprob;
  int* top_tokens;
  float* top_logprobs;
  u32* workspace;
  int vocab_size;
  int max_top;

  DEVICE LogitsRow<Logit> row_of_logits(int row) const {
    return {logits + static_cast<long>(row) * vocab_size, vocab_size};
  }
  DEVICE int num_slices() const { return (vocab_size + kSliceLogits - 1) / kSliceLogits; }

  // Part `index` of `num_parts`: as many slices each, fewer in the last ones.
  DEVICE LogitsPart<Logit> part_of(int row, int index, int num_parts) const {
    const int length = (num_slices() + num_parts - 1) / num_parts * kSliceLogits;
    return {row_of_logits(row), min(index * length, vocab_size), min((index + 1) * length, vocab_size)};
  }
  // -1: no log-probabilities; else how many of the likeliest tokens.
  DEVICE int num_top(int row) const { return num_logprobs == nullptr ? -1 : min(num_logprobs[row], max_top); }

  DEVICE Params params(int row) const {
    const float t = temperature[row];
    const int k = top_k[row];
    const float p = top_p[row];
    return {t,
            k,
            p,
            min_p[row],
            static_cast<u64>(seed[row]),
            static_cast<u32>(position[row]),
            t < 0x1p-126f,
            k > 0 && k < vocab_size,
            p < 1.0f};
  }

  DEVICE ScaledRow<Logit> scaled(int row, float largest, const Params& params) const {
    return {row_of_logits(row), largest, 1.0f / params.temperature};
  }

  DEVICE RowWorkspace row_workspace(int row) const {
    const long slices = num_slices();
    const long words = 3L * kBins + kStateWords + slices * (kPartWords + 2L * max_top);
    u32* const begin = workspace + row * words;
    RowWorkspace found;
    found.masses = reinterpret_cast<u64*>(begin);
    found.counts = begin + 2 * kBins;
    found.state = reinterpret_cast<RowState*>(begin + 3 * kBins);
    found.parts = reinterpret_cast<PartResult*>(begin + 3 * kBins + kStateWords);
    found.tops = reinterpret_cast<Candidate*>(found.parts + slices);
    return found;
  }
};
