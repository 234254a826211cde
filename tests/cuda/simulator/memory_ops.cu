// Memory, atomics, copies, barriers and the launch itself, through a compiler's eyes and as inline PTX.
#include "located.cuh"
typedef unsigned int u32;
typedef unsigned long long u64;
#define KERNEL extern "C" __global__ void
#define SHARED(p) ((u32)__cvta_generic_to_shared(p))

struct Numbers {
  char first;
  short second;
  double third;
  float many[3];
};
__constant__ int powers[4] = {1, 10, 100, 1000};
__device__ const float halves[4] = {0.5f, 1.5f, 2.5f, 3.5f};

KERNEL shows_itself(u32* out) {
  const u32 thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const u32 block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  u32 lane, dynamic, below;
  asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
  asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(dynamic));
  asm volatile("mov.u32 %0, %%lanemask_lt;" : "=r"(below));
  u32* mine = out + (block * blockDim.x * blockDim.y * blockDim.z + thread) * 4;
  mine[0] = block * 1000 + thread;
  mine[1] = lane;
  mine[2] = dynamic;
  mine[3] = below;
}
KERNEL takes_structs(Numbers numbers, char tail, double* out) {
  out[0] = numbers.first;
  out[1] = numbers.second;
  out[2] = numbers.third;
  out[3] = numbers.many[tail];
}
KERNEL reads_tables(const int* which, float* out) {
  const int i = threadIdx.x;
  out[i] = powers[which[i]] + halves[which[i]];
}
// Reverses 64 numbers through two static arrays and the dynamic one.
KERNEL reverses(const int* in, int* out) {
  __shared__ short narrow[64];
  __shared__ longlong2 wide[64];
  extern __shared__ __align__(16) char dynamic[];
  const int i = threadIdx.x;
  narrow[i] = (short)in[i];
  __syncthreads();
  wide[i] = longlong2{narrow[63 - i], i};
  __syncthreads();
  ((int4*)dynamic)[63 - i] = int4{(int)wide[i].x, (int)wide[i].y, 0, 7};
  __syncthreads();
  out[i] = ((int*)dynamic)[4 * (63 - i)] * ((int*)dynamic)[4 * (63 - i) + 3] + (int)wide[i].y - i;
}
// The compiler cannot tell which memory `p` points into.
KERNEL generic_pointers(int* global, int* out, int which) {
  __shared__ int shared[32];
  int local[32];
  for (int i = 0; i < 32; ++i) local[(i * 7) & 31] = 3 * i;
  shared[threadIdx.x] = 2 * threadIdx.x;
  __syncthreads();
  int* p = which == 0 ? global : which == 1 ? shared : local;
  asm volatile("" : "+l"(p));
  int value;
  asm volatile("ld.u32 %0, [%1];" : "=r"(value) : "l"(p + threadIdx.x) : "memory");
  asm volatile("st.u32 [%0], %1;" ::"l"(p + threadIdx.x), "r"(value + 1) : "memory");
  u32 before;
  asm volatile("atom.add.u32 %0, [%1], 100;" : "=r"(before) : "l"(p + threadIdx.x) : "memory");
  asm volatile("ld.u32 %0, [%1];" : "=r"(value) : "l"(p + threadIdx.x) : "memory");
  out[threadIdx.x] = value;
}
KERNEL narrow_loads(const signed char* in, int* out) {
  int value;
  asm volatile("{ .reg .b16 x; ld.global.s8 x, [%1]; cvt.s32.s16 %0, x; }" : "=r"(value) : "l"(in + threadIdx.x));
  out[threadIdx.x] = value;
}

#define ATOMIC(name, type, constraint, op)                                                                     \
  KERNEL atom_##name(const type* value, type* cells, type* old) {                                              \
    __shared__ type shared[8];                                                                                 \
    const int i = blockIdx.x * blockDim.x + threadIdx.x;                                                       \
    type before;                                                                                               \
    if (threadIdx.x < 8) shared[threadIdx.x] = cells[threadIdx.x];                                             \
    __syncthreads();                                                                                           \
    asm volatile("red.shared." op " [%0], %1;" ::"r"(SHARED(shared + i % 8)), constraint(value[i]) : "memory"); \
    __syncthreads();                                                                                           \
    asm volatile("atom.global." op " %0, [%1], %2;" : "=" constraint(before) : "l"(cells + i % 8), constraint(value[i]) : "memory"); \
    old[i] = before;                                                                                           \
    __syncthreads();                                                                                           \
    if (threadIdx.x < 8) old[i + gridDim.x * blockDim.x] = shared[threadIdx.x];                                \
  }
ATOMIC(add_u32, u32, "r", "add.u32")
ATOMIC(add_u64, u64, "l", "add.u64")
ATOMIC(add_f32, float, "f", "add.f32")
ATOMIC(min_s32, u32, "r", "min.s32")
ATOMIC(max_u64, u64, "l", "max.u64")
ATOMIC(and_b32, u32, "r", "and.b32")
ATOMIC(or_b32, u32, "r", "or.b32")
ATOMIC(xor_b64, u64, "l", "xor.b64")
ATOMIC(inc_u32, u32, "r", "inc.u32")
ATOMIC(dec_u32, u32, "r", "dec.u32")
KERNEL takes_tickets(u32* next, u32* owner) { owner[atomicAdd(next, 1u)] = blockIdx.x * blockDim.x + threadIdx.x; }
KERNEL swaps(u32* cells, u32* old) {
  u32 before;
  asm volatile("atom.global.cas.b32 %0, [%1], 5, 6;" : "=r"(before) : "l"(cells + threadIdx.x) : "memory");
  old[threadIdx.x] = before;
  asm volatile("atom.global.exch.b32 %0, [%1], 9;" : "=r"(before) : "l"(cells + threadIdx.x) : "memory");
  old[threadIdx.x + blockDim.x] = before;
}

// Thread i copies element i of a size; its first `valid` bytes come from `in`, the rest are zeros.
#define COPIES(name, size, cache)                                                                          \
  KERNEL name(const char* in, const u32* valid, char* out) {                                               \
    __shared__ __align__(16) char cells[32 * size];                                                        \
    const u32 to = SHARED(cells + threadIdx.x * size);                                                     \
    asm volatile("cp.async." cache ".shared.global [%0], [%1], " #size ", %2;" ::"r"(to),                  \
                 "l"(in + threadIdx.x * size), "r"(valid[threadIdx.x]) : "memory");                        \
    asm volatile("cp.async.wait_all;" ::: "memory");                                                       \
    __syncthreads();                                                                                       \
    for (int i = 0; i < size; ++i) out[threadIdx.x * size + i] = cells[threadIdx.x * size + i];            \
  }
COPIES(copy_4, 4, "ca")
COPIES(copy_8, 8, "ca")
COPIES(copy_16, 16, "cg")
// Three groups in flight, read as they land.
KERNEL copies_in_groups(const int* in, int* out) {
  __shared__ int cells[3];
  for (int i = 0; i < 3; ++i) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(SHARED(cells + i)), "l"(in + i) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.wait_group 2;" ::: "memory");
  out[0] = cells[0];
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  out[1] = cells[1];
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  out[2] = cells[2];
}

// Two pairs of warps pass numbers on, each pair by a barrier of its own.
KERNEL pairs_of_warps(int* out) {
  __shared__ int cells[128];
  const int pair = threadIdx.x / 64;
  if (threadIdx.x % 64 < 32) {
    for (int i = 0; i < 2; ++i) cells[pair * 64 + i * 32 + threadIdx.x % 32] = threadIdx.x + 1000 * i;
    if (pair == 0)
      asm volatile("bar.sync 1, 64;" ::: "memory");
    else
      asm volatile("bar.sync 2, 64;" ::: "memory");
  } else {
    asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory");
    for (int i = 0; i < 2; ++i) out[pair * 64 + i * 32 + threadIdx.x % 32] = cells[pair * 64 + i * 32 + threadIdx.x % 32];
  }
}
KERNEL counts_at_a_barrier(const int* in, int* out) {
  out[threadIdx.x] = __syncthreads_count(in[threadIdx.x]) * 100 + __syncthreads_and(in[threadIdx.x]) * 10 +
                     (__syncthreads_or(in[threadIdx.x]) != 0);
}
// Warp 1 waits by spinning for a flag that warp 0 raises.
KERNEL spins_within_the_block(int* out) {
  __shared__ volatile int flag;
  if (threadIdx.x == 0) flag = 0;
  __syncthreads();
  if (threadIdx.x == 40) flag = 1;
  while (!flag) {
  }
  out[threadIdx.x] = threadIdx.x;
}
KERNEL jumps_through_a_table(const int* which, int* out) {
  int r = -1;
  asm volatile(
      "{ table: .branchtargets ZERO, ONE, TWO; brx.idx %1, table;"
      " ZERO: mov.s32 %0, 10; bra DONE; ONE: mov.s32 %0, 11; bra DONE; TWO: mov.s32 %0, 12; DONE: }"
      : "+r"(r) : "r"(which[threadIdx.x]));
  out[threadIdx.x] = r;
}
extern "C" __global__ void __launch_bounds__(64) at_most_64_threads(int* out) { out[threadIdx.x] = 1; }
KERNEL much_shared(int* out) {
  extern __shared__ int cells[];
  cells[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = cells[threadIdx.x];
}
KERNEL traps_in_a_header(const int* in) {
  trap_if(in[0] == 0);  // here
}
