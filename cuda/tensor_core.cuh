// Copies to shared memory that do not wait, matrix loads and products: inline PTX of sm_80.
#pragma once

#include "scalar.cuh"

// Copies 16 bytes, or writes 16 zeros if `is_wanted` is false; `from` must be a valid address even then.
DEVICE void copy_async(void* to, const void* from, bool is_wanted) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from),
               "r"(is_wanted ? 16 : 0)
               : "memory");
}

DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `kGroups` of this thread's groups of copies are on their way.
template <int kGroups>
DEVICE void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kGroups) : "memory");
}

// Four 8x8 matrices of 16-bit elements: lane i names row i % 8 of matrix i / 8, and gets of each matrix the elements
// (lane / 4, lane % 4 * 2) and the one to the right.
DEVICE void load_matrices(u32 (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// The same of the transposed matrices.
DEVICE void load_matrices_transposed(u32 (&to)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// sum[16x8] += a[16x16] * b[16x8], in float32.
template <class T>
DEVICE void multiply_add(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1);
template <>
DEVICE void multiply_add<bf16>(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
DEVICE void multiply_add<half>(float (&sum)[4], const u32 (&a)[4], u32 b0, u32 b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
