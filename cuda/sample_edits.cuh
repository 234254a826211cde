// Changes of a row's logits before it is sampled: penalties, biases and bans by token, and masks. A block changes the
// part that it is about to read, so that no other block has to wait for it.
#pragma once

#include "sample_arguments.cuh"

struct RowChanges {
  const SampleArguments& all;
  int row;
  int first_edit;
  int end_edit;
  const u32* mask;  // null: none

  DEVICE RowChanges(const SampleArguments& all, int row) : all(all), row(row), first_edit(0), end_edit(0), mask(nullptr) {
    if (all.edit_indptr != nullptr) {
      first_edit = all.edit_indptr[row];
      end_edit = all.edit_indptr[row + 1];
    }
    if (all.mask_rows != nullptr && all.mask_rows[row] >= 0) {
      mask = all.masks + static_cast<long>(all.mask_rows[row]) * ((all.vocab_size + 31) / 32);
    }
  }

  DEVICE bool any() const { return first_edit < end_edit || mask != nullptr; }

  // Whatever the block has read of the part, it has met since. It may read the part after this.
  DEVICE void apply(const LogitsPart<LOGIT>& part) const {
    LOGIT* const logits = part.row.logits;
    for (int edit = first_edit + threadIdx.x; edit < end_edit; edit += kThreads) {
      const int token = all.edit_tokens[edit];
      if (token < part.begin || token >= part.end) continue;
      const float before = to_float(logits[token]);
      all.edit_logits[edit] = before;
      logits[token] = from_float<LOGIT>(edited(before, edit));
    }
    __syncthreads();  // a masked token may be an edited one
    for (int token = part.begin + threadIdx.x; mask != nullptr && token < part.end; token += kThreads) {
      if (!(mask[token / 32] >> token % 32 & 1)) logits[token] = from_float<LOGIT>(-kInfinity);
    }
    __syncthreads();
  }

  // The logit of `token`, which is not masked, before the edits. `memory`: one float.
  DEVICE float logit_before(int token, float* memory) const {
    if (threadIdx.x == 0) *memory = all.row_of_logits(row).at(token);
    __syncthreads();
    for (int edit = first_edit + threadIdx.x; edit < end_edit; edit += kThreads) {
      if (all.edit_tokens[edit] == token) *memory = all.edit_logits[edit];
    }
    __syncthreads();
    return *memory;
  }

 private:
  // In this order: penalties, bias; -inf bans whatever the logit is. Rounded as numpy does, hence no fused operations.
  DEVICE float edited(float x, int edit) const {
    const float* penalty = all.penalties + 3L * row;
    const int count = all.edit_counts[edit];
    if (count >= 0) x = x > 0.0f ? x / penalty[0] : x * penalty[0];
    if (count >= 1) x = __fsub_rn(__fsub_rn(x, __fmul_rn(penalty[1], static_cast<float>(count))), penalty[2]);
    return all.edit_biases[edit] == -kInfinity ? -kInfinity : x + all.edit_biases[edit];
  }
};
