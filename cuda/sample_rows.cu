// The next token of every row of logits, by the row's own parameters. README.md has the signature; the numpy twin is
// `sample_rows` in graphs/op_twins_rows.py, and the edits' is service/executor/logit_edits.py.
//
//   logits [num_rows, vocab_size] of LOGIT -> token [num_rows], log-probabilities where asked
//   grid (num_rows), 1024 threads: a block takes a row, a thread four neighbouring logits at a time, 4096 apart
//
// Passes over the row, which stays in the L2 cache after the first:
//   1. the largest logit (greedy rows are done then)        4. radix search for top_p: three
//   2. log-probabilities, if asked: 1, and 1 a top token    5. the race: one
//   3. radix search for top_k, if asked: three
// Thresholds are keys and not ranks, so tokens tied with the last one kept stay. min_p needs no pass.
//
// Shared memory: 2048 bins of 8 bytes, and a value of 8 bytes a warp; see SelectMemory.
//
// Bound: reading the row from the L2 cache; shared atomics in the first round of a search. One block a row leaves most
// of the device idle in small batches.
//
// History, none of it measured on a GPU yet:
//   1. bins of 64 bits by 64-bit atomics: in shared memory the compiler makes loops of compare-and-swap of them
//   2. bins in two halves: additions of the hardware's own, the second for large masses only
//   3. one piece of code for both searches and one for all rankings: fewer instructions
#include "gumbel_race.cuh"

namespace {

using Logit = LOGIT;

struct Edits {
  const float* penalties;
  const int* indptr;
  const int* tokens;
  const int* counts;
  const float* biases;
  float* before;  // the logits before the edits

  // In this order: penalties, bias; -inf bans whatever the logit is. Rounded as numpy does, hence no fused operations.
  DEVICE float apply(float x, int row, int edit) const {
    const float* penalty = penalties + 3L * row;
    const int count = counts[edit];
    if (count >= 0) x = x > 0.0f ? x / penalty[0] : x * penalty[0];
    if (count >= 1) x = __fsub_rn(__fsub_rn(x, __fmul_rn(penalty[1], static_cast<float>(count))), penalty[2]);
    return biases[edit] == -kInfinity ? -kInfinity : x + biases[edit];
  }
};

DEVICE void edit_logits(const LogitsRow<Logit>& logits, const Edits& edits, int row) {
  for (int edit = edits.indptr[row] + threadIdx.x; edit < edits.indptr[row + 1]; edit += kThreads) {
    Logit* logit = logits.logits + edits.tokens[edit];
    const float before = to_float(*logit);
    edits.before[edit] = before;
    *logit = from_float<Logit>(edits.apply(before, row, edit));
  }
}

DEVICE void mask_logits(const LogitsRow<Logit>& logits, const u32* mask) {
  for (int token = threadIdx.x; token < logits.vocab_size; token += kThreads) {
    if (!(mask[token / 32] >> token % 32 & 1)) logits.logits[token] = from_float<Logit>(-kInfinity);
  }
}

// The logit of `token` before the row's edits. `memory`: one float.
DEVICE float logit_before(const LogitsRow<Logit>& logits, const Edits& edits, int row, int token, float* memory) {
  if (threadIdx.x == 0) *memory = logits.at(token);
  __syncthreads();
  if (edits.indptr != nullptr) {
    for (int edit = edits.indptr[row] + threadIdx.x; edit < edits.indptr[row + 1]; edit += kThreads) {
      if (edits.tokens[edit] == token) *memory = edits.before[edit];
    }
  }
  __syncthreads();
  return *memory;
}

// Subtracted from a logit it gives the log-probability.
DEVICE float log_of_total(const LogitsRow<Logit>& logits, float largest, void* memory) {
  float total = 0.0f;
  logits.for_quads<2>([&](int, const float (&values)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) total += exp2_approx((values[i] - largest) * 1.44269504f);
  });
  return logf(reduce_block(total, memory));
}

struct Params {
  float temperature;
  int top_k;
  float top_p;
  float min_p;
  u64 seed;
  u32 position;
};

DEVICE int draw(const LogitsRow<Logit>& logits, float largest, const Params& params, SelectMemory* memory) {
  const ScaledRow<Logit> scaled = {logits, largest, 1.0f / params.temperature};
  const bool has_top_k = params.top_k > 0 && params.top_k < logits.vocab_size;
  const bool has_top_p = params.top_p < 1.0f;
  u32 last_key = 0xffffffffu;
#pragma unroll 1
  for (int i = has_top_k ? 0 : 1; i < (has_top_p ? 2 : 1); ++i) {  // top_p is a share of what top_k leaves
    const Search search = i == 0 ? Search::of_count(params.top_k) : Search::of_mass(params.top_p);
    last_key = select_key(scaled, last_key, search, memory);
  }
  last_key = min(last_key, key_of(kLowest));
  if (params.min_p > 0.0f) last_key = min(last_key, key_of(logf(params.min_p)));
  return race(scaled, last_key, params.seed, params.position, memory->of_warps);
}

}  // namespace

extern "C" __global__ void __launch_bounds__(kThreads)
    sample_rows(Logit* all_logits, const float* temperature, const int* top_k, const float* top_p, const float* min_p,
                const long long* seed, const int* position, const float* penalties, const int* edit_indptr,
                const int* edit_tokens, const int* edit_counts, const float* edit_biases, float* edit_logits_before,
                const int* mask_rows, const u32* masks, const int* num_logprobs, int* token, float* logprob,
                int* top_tokens, float* top_logprobs, int vocab_size, int max_top) {
  extern __shared__ __align__(16) char smem[];
  SelectMemory* memory = reinterpret_cast<SelectMemory*>(smem);
  const int row = blockIdx.x;
  const LogitsRow<Logit> logits = {all_logits + static_cast<long>(row) * vocab_size, vocab_size};
  const Edits edits = {penalties, edit_indptr, edit_tokens, edit_counts, edit_biases, edit_logits_before};
  const Candidate before_all = {kInfinity, -1};
  const int num_top = num_logprobs == nullptr ? -1 : min(num_logprobs[row], max_top);

  Candidate likeliest = before_all;
  Candidate next = before_all;
  float log_total = 0.0f;
#pragma unroll 1
  for (int i = 0; i < max(num_top, 1); ++i) {
    next = logits.best_after(next, memory->of_warps);
    if (i == 0) likeliest = next;
    if (i == 0 && num_top >= 0) log_total = next.value + log_of_total(logits, next.value, memory->of_warps);
    if (i < num_top && threadIdx.x == 0) {
      top_tokens[static_cast<long>(row) * max_top + i] = next.token == kNoToken ? -1 : next.token;
      top_logprobs[static_cast<long>(row) * max_top + i] = next.value - log_total;
    }
  }

  const bool is_edited = edit_indptr != nullptr && edit_indptr[row] < edit_indptr[row + 1];
  const bool is_masked = mask_rows != nullptr && mask_rows[row] >= 0;
  if (is_edited) edit_logits(logits, edits, row);
  __syncthreads();  // a masked token may be an edited one
  if (is_masked) mask_logits(logits, masks + static_cast<long>(mask_rows[row]) * ((vocab_size + 31) / 32));
  __syncthreads();
  if (is_edited || is_masked) likeliest = logits.best_after(before_all, memory->of_warps);

  int chosen = -1;
  if (likeliest.value < kInfinity && likeliest.value > -kInfinity) {
    const Params params = {temperature[row],
                           top_k[row],
                           top_p[row],
                           min_p[row],
                           static_cast<u64>(seed[row]),
                           static_cast<u32>(position[row])};
    chosen = params.temperature < 0x1p-126f ? likeliest.token : draw(logits, likeliest.value, params, memory);
  }
  if (num_top >= 0 && chosen >= 0) {
    const float before = logit_before(logits, edits, row, chosen, reinterpret_cast<float*>(memory->of_warps));
    if (threadIdx.x == 0) logprob[row] = before - log_total;
  }
  if (threadIdx.x == 0) token[row] = chosen;
}
