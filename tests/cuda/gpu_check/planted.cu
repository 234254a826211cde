// One bug for each tool of compute-sanitizer, to see that it finds them. Nothing here is right.
//
// Each kernel: grid (1), block 64, shared 0
//   0 out   unsigned* [num_words]
//   1 in    const unsigned* [num_words], of which nobody has written any
//   2 num_words  int, 64

constexpr int kThreads = 64;

// Writes behind the end of `out`.
extern "C" __global__ void planted_memcheck(unsigned* out, const unsigned* in, int num_words) {
  out[num_words + threadIdx.x] = 1;
}

// Reads what another warp writes, without a barrier between.
extern "C" __global__ void planted_racecheck(unsigned* out, const unsigned* in, int num_words) {
  __shared__ unsigned words[kThreads];
  words[threadIdx.x] = num_words + threadIdx.x;
  out[threadIdx.x] = words[(threadIdx.x + 32) % kThreads];
}

// Half of the block waits at a barrier that the other half never comes to.
extern "C" __global__ void planted_synccheck(unsigned* out, const unsigned* in, int num_words) {
  if (threadIdx.x < 32) __syncthreads();
  out[threadIdx.x] = num_words;
}

// Reads global memory that nobody has written.
extern "C" __global__ void planted_initcheck(unsigned* out, const unsigned* in, int num_words) {
  out[threadIdx.x] = in[threadIdx.x];
}
