// The next token of every row of logits, by the row's own parameters: three kernels, launched one behind the other.
// README.md has the signature; the numpy twin is `sample_rows` in graphs/op_twins_rows.py, and the edits' is
// service/executor/logit_edits.py.
//
//   logits [num_rows, vocab_size] of LOGIT -> token [num_rows], log-probabilities where asked
//   512 threads, 8 neighbouring logits each: a slice of 4,096. A block of the first two kernels takes 1 to 4 slices
//
//   sample_scan   grid (num_rows, num_parts)  edits; a part's likeliest token, winner of the race, masses, top tokens
//   sample_count  grid (num_rows, num_parts)  merges the parts; token of rows without top_k and top_p, and nearly
//                                             always with min_p; a histogram of the others
//   sample_draw   grid (num_rows)             their token
//
// How often the logits are read from memory, V of them a row (a block's other loops over its part find it in the L1
// cache, all but those of edited rows with log-probabilities, which have to write it):
//   greedy; drawn by temperature; log-probabilities, with the likeliest tokens: once
//   top_k, top_p: twice, and that decides the token where the winner among all tokens is a likeliest one or kept for
//     sure, which has about the probability that top_p asks for; else once more, by one block, which lists up to 4,096
//     tokens that matter
//   more tokens than that (tied ones, or flat masses), and the winner not kept for sure: 3 times a search and once for
//     the race, by one block
// One block read everything before: 1 and 1 for the race, 3 a search, 1 for log-probabilities and for each top token.
//
// The race runs before the row's largest logit is known, relative to that of the part. So scores differ from the exact
// ones by rounding, and a row whose best two are closer than that, one in 16,000, races again in sample_draw. Tokens
// therefore depend neither on the number of parts nor on the batch. The last digits of log-probabilities depend on the
// number of parts: deterministic executors always have a block take one slice.
//
// Between blocks everything goes through the end of a kernel: nothing has to be reset or ordered by fences. That costs
// two launches, which for rows that are done end at once. Histograms are sums of integers, in any order the same.
//
// Shared memory, static: 0.3, 24 and 41 KiB. Bound, at batch 1: latencies of launches and loads; in large batches:
// instructions, a third of them Philox's.
//
// History, none of it measured on a GPU yet:
//   1. bins of 64 bits by 64-bit atomics: in shared memory the compiler makes loops of compare-and-swap of them
//   2. bins in two halves: additions of the hardware's own, the second for large masses only
//   3. one piece of code for both searches and one for all rankings: fewer instructions
//   4. a row over many blocks, three kernels, loads of 16 bytes: one pass or two where there were two to eight
#include "sample_edits.cuh"
#include "sample_filter.cuh"
#include "sample_merge.cuh"

namespace {

using Logit = LOGIT;

struct CountMemory {
  alignas(16) char of_warps[kReduceBytes];
  Histogram bins;
};

constexpr int kListTokens = 4096;

struct DrawMemory {
  alignas(16) char of_warps[kReduceBytes];
  SelectMemory select;
  u32 list[kListTokens];
  u32 num_listed;
};

DEVICE bool is_usable(float largest) { return largest < kInfinity && largest > -kInfinity; }

DEVICE void report(const SampleArguments& all, int row, float log_total, int chosen, void* memory) {
  if (all.num_top(row) >= 0 && chosen >= 0) {
    const float before = RowChanges(all, row).logit_before(chosen, static_cast<float*>(memory));
    if (threadIdx.x == 0) all.logprob[row] = before - log_total;
  }
  if (threadIdx.x == 0) all.token[row] = chosen;
}

// The model's likeliest tokens of the part, and the sum of its masses.
DEVICE void scan_model(const LogitsPart<Logit>& part, int num_top, Candidate* tops, PartResult* result, void* memory) {
  Candidate next = kBeforeAll;
#pragma unroll 1
  for (int top = 0; top < max(num_top, 1); ++top) {
    next = part.best_after(next, memory);
    if (top == 0) {
      const float total = next.value > -kInfinity ? part.mass(next.value, memory) : 0.0f;
      if (threadIdx.x == 0) {
        result->model_largest = next.value;
        result->model_total = total;
      }
    }
    if (top < num_top && threadIdx.x == 0) tops[top] = next;
  }
}

DEVICE void scan(const SampleArguments& all, char* memory) {
  const int row = blockIdx.x;
  const LogitsPart<Logit> part = all.part_of(row, blockIdx.y, gridDim.y);
  const RowWorkspace workspace = all.row_workspace(row);
  PartResult* const result = workspace.parts + blockIdx.y;
  const int num_top = all.num_top(row);
  if (num_top >= 0) {
    scan_model(part, num_top, workspace.tops + static_cast<long>(blockIdx.y) * all.max_top, result, memory);
  }
  const RowChanges changes(all, row);
  if (changes.any()) changes.apply(part);
  const Params params = all.params(row);
  const Candidate likeliest = part.best_after(kBeforeAll, memory);
  Contender winner = kNoContender;
  if (!params.is_greedy && is_usable(likeliest.value)) {
    const Race<Logit> race = {all.scaled(row, likeliest.value, params), 0xffffffffu, params.seed, params.position};
    winner = race.run(part, memory);
  }
  if (threadIdx.x == 0) {
    result->likeliest = likeliest;
    result->winner = winner.best.token;
    result->lead = winner.best.value - winner.next;
  }
  if (!params.has_search()) return;
  for (int bin = blockIdx.y * kThreads + threadIdx.x; bin < kBins; bin += gridDim.y * kThreads) {
    workspace.masses[bin] = workspace.counts[bin] = 0;
  }
}

DEVICE void count(const SampleArguments& all, CountMemory* memory) {
  const int row = blockIdx.x;
  const int num_parts = gridDim.y;
  const Params params = all.params(row);
  if (blockIdx.y > 0 && !params.has_search()) return;
  const RowWorkspace workspace = all.row_workspace(row);
  const Candidate likeliest = likeliest_of(workspace, num_parts, memory->of_warps);
  const ScaledRow<Logit> scaled = all.scaled(row, likeliest.value, params);
  if (params.has_search() && is_usable(likeliest.value)) {
    count_tokens(scaled, all.part_of(row, blockIdx.y, num_parts), params.has_top_p, workspace, &memory->bins);
  }
  if (blockIdx.y > 0) return;

  RowState state = {likeliest.value, 0.0f, kNoToken, 0, false};
  if (all.num_top(row) >= 0) {
    state.log_total = log_total_of(workspace, num_parts, memory->of_warps);
    report_top(all, row, workspace, num_parts, state.log_total, memory->of_warps);
  }
  int chosen = -1;
  if (is_usable(likeliest.value)) {
    chosen = likeliest.token;
    if (!params.is_greedy) {
      const Race<Logit> race = {scaled, 0xffffffffu, params.seed, params.position};
      chosen = state.winner = winner_of(race, workspace, num_parts, memory->of_warps);
      if (chosen != kNoToken) state.winner_key = key_of(scaled.z_of(scaled.row.at(chosen)));
      // A likeliest token is kept whatever is asked for.
      const bool is_kept = state.winner_key == 0 || (!params.has_search() && state.winner_key <= params.last_key());
      state.is_open = chosen == kNoToken || !is_kept;
    }
  }
  if (threadIdx.x == 0) *workspace.state = state;
  if (!state.is_open) report(all, row, state.log_total, chosen, memory->of_warps);
}

DEVICE void draw(const SampleArguments& all, DrawMemory* memory) {
  const int row = blockIdx.x;
  const RowWorkspace workspace = all.row_workspace(row);
  const RowState state = *workspace.state;
  if (!state.is_open) return;
  const Params params = all.params(row);
  const ScaledRow<Logit> scaled = all.scaled(row, state.largest, params);
  u32 last_key = params.last_key();
  bool is_kept = state.winner != kNoToken && state.winner_key <= last_key;
  int num_listed = 0;
  if (params.has_search()) {
    const Cuts cuts = find_cuts(workspace, params, &memory->select);
    const bool is_sure = is_kept && static_cast<int>(state.winner_key >> kFirstShift) < cuts.first_unsure;
    if (!is_sure) {
      if (cuts.num_tokens <= kListTokens) {
        num_listed = static_cast<int>(cuts.num_tokens);
        if (threadIdx.x == 0) memory->num_listed = 0;
        __syncthreads();
        list_tokens(scaled, cuts.last, memory->list, &memory->num_listed);
        const ListedTokens<Logit> listed = {scaled, memory->list, num_listed};
        last_key = min(last_key, last_key_of(listed, params, cuts, &memory->select));
      } else {
        last_key = min(last_key, last_key_of(RowTokens<Logit>{scaled}, params, cuts, &memory->select));
      }
      is_kept = is_kept && state.winner_key <= last_key;
    }
  }
  int chosen = state.winner;
  if (!is_kept) {
    const Race<Logit> race = {scaled, last_key, params.seed, params.position};
    chosen = num_listed > 0 ? race.winner_of_list(memory->list, num_listed, memory->of_warps)
                            : race.run(LogitsPart<Logit>::all_of(scaled.row), memory->of_warps).best.token;
  }
  report(all, row, state.log_total, chosen, memory->of_warps);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads, 2) sample_scan(SAMPLE_PARAMETERS) {
  __shared__ __align__(16) char memory[kReduceBytes];
  scan(SAMPLE_ARGUMENTS, memory);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) sample_count(SAMPLE_PARAMETERS) {
  __shared__ CountMemory memory;
  count(SAMPLE_ARGUMENTS, &memory);
}

extern "C" __global__ void __launch_bounds__(kThreads, 2) sample_draw(SAMPLE_PARAMETERS) {
  __shared__ DrawMemory memory;
  draw(SAMPLE_ARGUMENTS, &memory);
}
