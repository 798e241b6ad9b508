// Tensor cores as every card from sm_80 on has them: a warp copies tiles to shared memory, loads fragments of 16-bit
// matrices from there, and multiplies them into sums in registers.
//
// PTX ISA, sections on cp.async, ldmatrix and mma.m16n8k16. Lane l has, with g = l / 4 and t = l % 4:
//   a (16×16)  registers of (row g, columns 2t, 2t+1), (g+8, same), (g, 2t+8, 2t+9), (g+8, same)
//   b (16×8)   registers of (rows 2t, 2t+1, column g) and (2t+8, 2t+9, g)
//   c (16×8)   floats at (g, 2t), (g, 2t+1), (g+8, 2t), (g+8, 2t+1)
#pragma once
#include "common.h"

__device__ inline uint32 shared_address(const void *pointer) { return uint32(__cvta_generic_to_shared(pointer)); }

// Copies 16 bytes to shared memory in the background, or 4; zeros if not `there`, and nothing is read then.
__device__ inline void copy_16_async(void *to, const void *from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 16 : 0)
               : "memory");
}
__device__ inline void copy_4_async(void *to, const void *from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared_address(to)), "l"(from), "r"(there ? 4 : 0)
               : "memory");
}
// Ends a group of this thread's copies. wait_copies returns when all but the last `kRunning` groups are there.
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kRunning>
__device__ inline void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kRunning) : "memory");
}

// Four 8×8 matrices. Lane l gives the address of row l % 8 of matrix l / 8, 16 bytes; register i gets of matrix i the
// elements (l / 4, 2 (l % 4)) and the one right of it.
__device__ inline void load_matrices(uint32 (&to)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}
// The same matrices transposed: elements (2 (l % 4), l / 4) and the one below it.
__device__ inline void load_matrices_transposed(uint32 (&to)[4], const void *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(shared_address(row))
               : "memory");
}

// c += a b
template <typename T>
__device__ void multiply(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1);
template <>
__device__ inline void multiply<bf16>(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
template <>
__device__ inline void multiply<f16>(float (&c)[4], const uint32 (&a)[4], uint32 b0, uint32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
