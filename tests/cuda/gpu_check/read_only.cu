// The most that a kernel can read: every thread xors 16 bytes at a time, and leaves one word.
//
// read_only: grid (blocks), block 512, shared 0
//   0 words    const uint4* [num_quads]
//   1 out      uint32* [blocks * 512], out: the xor of what each thread has read
//   2 num_quads  int64
//
// A thread's loads lie a grid apart, so that a warp reads 512 bytes in a row; 8 are in flight at a time, 64 KiB a block.
// Bound by memory alone: one xor a word.

constexpr int kThreads = 512;
constexpr int kInFlight = 8;

__device__ inline uint4 load(const uint4* at) {
  uint4 quad;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(quad.x), "=r"(quad.y), "=r"(quad.z), "=r"(quad.w)
               : "l"(at));
  return quad;
}

extern "C" __global__ void __launch_bounds__(kThreads)
    read_only(const uint4* words, unsigned* out, long long num_quads) {
  const long long stride = static_cast<long long>(gridDim.x) * kThreads;
  const long long thread = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  unsigned sum = 0;
  long long at = thread;
  for (; at + (kInFlight - 1) * stride < num_quads; at += kInFlight * stride) {
    uint4 quads[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) quads[i] = load(words + at + i * stride);
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) sum ^= quads[i].x ^ quads[i].y ^ quads[i].z ^ quads[i].w;
  }
  for (; at < num_quads; at += stride) {
    const uint4 quad = load(words + at);
    sum ^= quad.x ^ quad.y ^ quad.z ^ quad.w;
  }
  out[thread] = sum;
}
