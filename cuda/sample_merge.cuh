// What a row's parts have left, put together by one block.
#pragma once

#include "gumbel_race.cuh"
#include "sample_arguments.cuh"

// Scores of a part are relative to its own largest logit, and off from the exact ones by 2^-16 at most where they can
// win: within 21 of the likeliest token's. So two that are further apart than this have the same order.
constexpr float kRoundOff = 0x1p-14f;

DEVICE Candidate likeliest_of(const RowWorkspace& row, int num_parts, void* memory) {
  Candidate mine = {-kInfinity, kNoToken};
  for (int i = threadIdx.x; i < num_parts; i += kThreads) mine = joined(mine, row.parts[i].likeliest);
  return reduce_block(mine, memory);
}

// Subtracted from a logit it gives the log-probability.
DEVICE float log_total_of(const RowWorkspace& row, int num_parts, void* memory) {
  Candidate best = {-kInfinity, kNoToken};
  for (int i = threadIdx.x; i < num_parts; i += kThreads) best = joined(best, {row.parts[i].model_largest, i});
  const float largest = reduce_block(best, memory).value;
  float total = 0.0f;
  for (int i = threadIdx.x; i < num_parts; i += kThreads) {
    total += row.parts[i].model_total * exp2_approx((row.parts[i].model_largest - largest) * kLog2E);
  }
  return largest + logf(reduce_block(total, memory));
}

DEVICE void report_top(const SampleArguments& all, int row_index, const RowWorkspace& row, int num_parts,
                       float log_total, void* memory) {
  const int num_top = all.num_top(row_index);
  Candidate next = kBeforeAll;
#pragma unroll 1
  for (int top = 0; top < num_top; ++top) {
    Candidate mine = {-kInfinity, kNoToken};
    for (int i = threadIdx.x; i < num_parts * num_top; i += kThreads) {
      const Candidate each = row.tops[i / num_top * all.max_top + i % num_top];
      if (next.beats(each) && each.beats(mine)) mine = each;
    }
    next = reduce_block(mine, memory);
    if (threadIdx.x == 0) {
      const long place = static_cast<long>(row_index) * all.max_top + top;
      all.top_tokens[place] = next.token == kNoToken ? -1 : next.token;
      all.top_logprobs[place] = next.value - log_total;
    }
  }
}

// The token with the best score; kNoToken if one that did not win its part may have a better one.
DEVICE int winner_of(const Race<LOGIT>& race, const RowWorkspace& row, int num_parts, void* memory) {
  Contender mine = kNoContender;
  float best_second = -kInfinity;
#pragma unroll 1
  for (int i = threadIdx.x; i < num_parts; i += kThreads) {
    const PartResult& part = row.parts[i];
    if (part.winner == kNoToken) continue;
    const float score = race.score_of(part.winner);
    best_second = fmaxf(best_second, score - part.lead);
    mine = joined(mine, {{score, part.winner}, -kInfinity});
  }
  const Candidate best = reduce_block(mine, memory).best;
  return __syncthreads_or(best_second + kRoundOff >= best.value) ? kNoToken : best.token;
}
