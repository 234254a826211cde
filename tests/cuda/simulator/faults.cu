// Kernels with one fault each. A test finds the line that must be named by the comment `fault NAME` on it.
typedef unsigned int u32;
typedef unsigned long long u64;
#define KERNEL extern "C" __global__ void
#define SHARED(p) ((u32)__cvta_generic_to_shared(p))

KERNEL leaves_before_barrier(int* out) {
  if (threadIdx.x == 5) return;
  __syncthreads();  // fault leaves_before_barrier
  out[threadIdx.x] = 1;
}
KERNEL different_barriers(int* out) {
  if (threadIdx.x < 32)
    __syncthreads();  // fault different_barriers
  else
    asm volatile("bar.sync 0;");
  out[threadIdx.x] = 1;
}
KERNEL barrier_counts(int* out) {
  if (threadIdx.x < 32)
    asm volatile("bar.sync 1, 64;");
  else
    asm volatile("bar.sync 1, 32;");  // fault barrier_counts
  out[threadIdx.x] = 1;
}
KERNEL outside_own_mask(int* out) {
  out[threadIdx.x] = __shfl_sync(0x0000ffff, threadIdx.x, 0);  // fault outside_own_mask
}
KERNEL overlapping_masks(int* out) {
  if (threadIdx.x < 16)
    out[threadIdx.x] = __shfl_sync(0x0001ffff, threadIdx.x, 0);
  else
    out[threadIdx.x] = __shfl_sync(0xffff0000, threadIdx.x, 16);  // fault overlapping_masks
}
KERNEL reads_absent_lane(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_down_sync(0x0000ffff, threadIdx.x, 1);  // fault reads_absent_lane
}
KERNEL different_operations(int* out) {
  if (threadIdx.x < 16)
    __syncwarp();
  else
    out[threadIdx.x] = __shfl_sync(~0u, threadIdx.x, 0);  // fault different_operations
}
KERNEL lanes_missing(int* out) {
  for (int i = threadIdx.x; i < 40; i += 32) out[i] = __shfl_sync(~0u, i, 0);  // fault lanes_missing
}
KERNEL partial_warp_mma(float* out) {
  u32 r = 0;
  float d = 0, e = 0, f = 0, g = 0;
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%4,%4,%4}, {%4,%4}, {%0,%1,%2,%3};" : "+f"(d), "+f"(e), "+f"(f), "+f"(g) : "r"(r));  // fault partial_warp_mma
  out[threadIdx.x] = d + e + f + g;
}
KERNEL waits_for_ever(volatile int* flag) {
  while (flag[0] != 1) {  // fault waits_for_ever
  }
}
KERNEL static_overrun(int* out) {
  __shared__ int a[32], b[32];
  a[threadIdx.x] = b[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = a[threadIdx.x + 1] + b[threadIdx.x];  // fault static_overrun
}
KERNEL dynamic_overrun(int* out) {
  extern __shared__ int cells[];
  cells[threadIdx.x + 1] = 1;  // fault dynamic_overrun
  out[threadIdx.x] = cells[threadIdx.x + 1];
}
KERNEL unconverted_pointer(int* out) {
  __shared__ int cell;
  int value = 0;
  if (threadIdx.x == 0) cell = 1;
  __syncthreads();
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"((u32)(u64)&cell));  // fault unconverted_pointer
  out[threadIdx.x] = value;
}
KERNEL nobody_wrote(int* out) {
  __shared__ int cells[32];
  if (threadIdx.x) cells[threadIdx.x] = 1;
  __syncthreads();
  out[threadIdx.x] = cells[threadIdx.x];  // fault nobody_wrote
}
KERNEL too_little_alignment(int* out) {
  __shared__ char plain[1024];  // aligned to one byte only
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(SHARED(plain + threadIdx.x * 4)), "r"(1) : "memory");  // fault too_little_alignment
  out[threadIdx.x] = plain[threadIdx.x * 4];
}
KERNEL misaligned_global(const char* in, int* out) {
  out[threadIdx.x] = *(const int*)(in + 2);  // fault misaligned_global
}
KERNEL division_by_zero(int* out) {
  out[threadIdx.x] = 100 / out[threadIdx.x];  // fault division_by_zero
}
KERNEL wild_address(int* out) { out[1l << 45] = 1; }
KERNEL traps(int* out) {
  if (out[0] == 0) __trap();  // fault traps
}

// One thread copies 16 bytes; the steps between differ.
#define COPY(size) asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(SHARED(cells)), "l"(in), "r"(size) : "memory")
#define COMMIT asm volatile("cp.async.commit_group;" ::: "memory")
#define WAIT(keep) asm volatile("cp.async.wait_group %0;" ::"n"(keep) : "memory")
KERNEL reads_before_wait(const int* in, int* out) {
  __shared__ __align__(16) int cells[4];
  COPY(16);
  COMMIT;
  WAIT(1);
  out[0] = cells[0];  // fault reads_before_wait
}
KERNEL waits_uncommitted(const int* in, int* out) {
  __shared__ __align__(16) int cells[4];
  COPY(16);
  WAIT(0);
  out[0] = cells[0];  // fault waits_uncommitted
}
KERNEL never_commits(const int* in, int* out) {
  __shared__ __align__(16) int cells[4];
  COPY(16);
  WAIT(0);
  out[0] = 1;
}
KERNEL leaves_in_flight(const int* in, int* out) {
  __shared__ __align__(16) int cells[4];
  COPY(16);
  COMMIT;
  out[0] = 1;
}
KERNEL writes_in_flight(const int* in, int* out) {
  __shared__ __align__(16) int cells[4];
  COPY(16);
  cells[1] = 7;  // fault writes_in_flight
  COMMIT;
  WAIT(0);
  out[0] = cells[1];
}
KERNEL copies_in_flight(const int* in, int* out) {
  __shared__ __align__(16) int cells[4];
  COPY(16);
  COMMIT;
  COPY(16);  // fault copies_in_flight
  COMMIT;
  WAIT(0);
  out[0] = cells[1];
}
KERNEL copies_too_much(const int* in, int* out) {
  __shared__ __align__(16) int cells[4];
  COPY(20);  // fault copies_too_much
  COMMIT;
  WAIT(0);
  out[0] = cells[1];
}
KERNEL misaligned_copy(const int* in, int* out) {
  __shared__ __align__(16) int cells[4];
  ++in;
  COPY(16);  // fault misaligned_copy
  COMMIT;
  WAIT(0);
  out[0] = cells[1];
}

// ---- seen by AddressSanitizer
KERNEL reads_past_the_end(const int* in, int* out, int count) {
  out[0] = in[count];  // fault reads_past_the_end
}
KERNEL writes_before_the_start(int* out) {
  out[-1] = 1;  // fault writes_before_the_start
}
KERNEL copies_past_the_end(const int* in, int* out) {
  __shared__ __align__(16) int cells[4];
  in += 4;
  COPY(16);  // fault copies_past_the_end
  COMMIT;
  WAIT(0);
  out[0] = cells[0];
}
KERNEL leaves_local_array(const int* in, int* out) {
  int local[8];
  for (int i = 0; i < 8; ++i) local[in[i] & 7] = in[i];
  out[0] = local[in[0] + 8];  // fault leaves_local_array
}

// ---- seen by ThreadSanitizer
KERNEL no_barrier(int* out) {
  __shared__ int cells[64];
  cells[threadIdx.x] = threadIdx.x;  // fault no_barrier
  if (threadIdx.x < 32) __syncwarp();
  out[threadIdx.x] = threadIdx.x ? 0 : cells[threadIdx.x + 1];
}
KERNEL shuffle_is_no_fence(int* out) {
  __shared__ int cells[32];
  cells[threadIdx.x] = threadIdx.x;  // fault shuffle_is_no_fence
  const int one = __shfl_sync(~0u, 1, 0);
  out[threadIdx.x] = cells[threadIdx.x ^ one];
}
KERNEL blocks_write_one_cell(int* out) {
  __syncthreads();
  if (threadIdx.x == blockIdx.x) out[0] = blockIdx.x;  // fault blocks_write_one_cell
}
// The last block to arrive reads what the others wrote.
template <bool fenced>
__device__ __forceinline__ void last_block_sums(int* parts, u32* arrived, int* out) {
  __shared__ bool is_last;
  if (threadIdx.x == 3) {
    parts[blockIdx.x] = blockIdx.x + 1;
    if (fenced) __threadfence();
    is_last = atomicAdd(arrived, 1u) == gridDim.x - 1;
    if (fenced) __threadfence();
  }
  __syncthreads();
  if (is_last && threadIdx.x == 0) {
    int sum = 0;
    for (int i = 0; i < gridDim.x; ++i) sum += ((volatile int*)parts)[i];
    out[0] = sum;
  }
}
KERNEL last_block_with_fences(int* parts, u32* arrived, int* out) { last_block_sums<true>(parts, arrived, out); }
KERNEL last_block_without_fences(int* parts, u32* arrived, int* out) { last_block_sums<false>(parts, arrived, out); }
