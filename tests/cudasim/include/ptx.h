// PTX instructions that KRNL's kernels use, each a function of its name with _ for . and ::, and of its operands in
// their order. source.py makes calls of asm statements. Included behind the kernel's own names of types.
#pragma once

#include "cuda.h"
#include "numbers.h"

// Reports name the function that has an instruction, not the instruction.
#define PTX __attribute__((always_inline)) inline

namespace ptx {

using cudasim::Operation;
using cudasim::Slot;
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

// ---- Conversions ----

PTX void cvt_f32_f16(float &to, u16 from) { to = cudasim::from_f16(from); }
PTX void cvt_rn_bf16_f32(u16 &to, float from) { to = cudasim::to_bf16(from); }
PTX void cvt_rn_f16_f32(u16 &to, float from) { to = cudasim::to_f16(from); }
PTX void cvt_rn_bf16x2_f32(u32 &to, float high, float low) {
  to = u32(cudasim::to_bf16(high)) << 16 | cudasim::to_bf16(low);
}
PTX void cvt_rn_f16x2_f32(u32 &to, float high, float low) {
  to = u32(cudasim::to_f16(high)) << 16 | cudasim::to_f16(low);
}

PTX void ex2_approx_ftz_f32(float &to, float from) {
  to = exp2f(from);
  if (to < 0x1p-126f) to = 0.0f;
}

// The error of the approximation is not modelled.
PTX void rcp_approx_ftz_f32(float &to, float from) {
  const float sign = __uint_as_float((__float_as_uint(from) & 0x80000000) | 0x3F800000);
  to = 1.0f / (fabsf(from) < 0x1p-126f ? 0.0f * sign : from);
  if (fabsf(to) < 0x1p-126f) to = 0.0f * sign;
}

// ---- Kernels one behind the other ----

PTX void griddepcontrol_launch_dependents() { cudasim_let_next_begin(); }
PTX void griddepcontrol_wait() { cudasim_wait_for_previous(); }

// ---- A warp's operations ----

PTX void load(Operation operation, u32 &a, u32 &b, u32 &c, u32 &d, u32 row) {
  const Slot *slots = cudasim_exchange(operation, &row, sizeof row);
  const uint4 four = cudasim::of_lane<uint4>(slots, cudasim::lane());
  a = four.x, b = four.y, c = four.z, d = four.w;
}
PTX void ldmatrix_sync_aligned_m8n8_x4_shared_b16(u32 &a, u32 &b, u32 &c, u32 &d, u32 row) {
  load(Operation::load, a, b, c, d, row);
}
PTX void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(u32 &a, u32 &b, u32 &c, u32 &d, u32 row) {
  load(Operation::load_transposed, a, b, c, d, row);
}
PTX void stmatrix_sync_aligned_m8n8_x4_shared_b16(u32 row, u32 a, u32 b, u32 c, u32 d) {
  const u32 given[5] = {row, a, b, c, d};
  cudasim_exchange(Operation::store, given, sizeof given);
}

PTX void multiply(Operation operation, float &d0, float &d1, float &d2, float &d3, const u32 (&a)[4], const u32 (&b)[2],
                     const float (&c)[4]) {
  struct {
    u32 a[4], b[2];
    float c[4];
  } given;
  __builtin_memcpy(given.a, a, sizeof a);
  __builtin_memcpy(given.b, b, sizeof b);
  __builtin_memcpy(given.c, c, sizeof c);
  const Slot *slots = cudasim_exchange(operation, &given, sizeof given);
  const float4 four = cudasim::of_lane<float4>(slots, cudasim::lane());
  d0 = four.x, d1 = four.y, d2 = four.z, d3 = four.w;
}
PTX void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float &d0, float &d1, float &d2, float &d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1,
    float c2, float c3) {
  multiply(Operation::multiply_bf16, d0, d1, d2, d3, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3});
}
PTX void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(
    float &d0, float &d1, float &d2, float &d3, u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, float c0, float c1,
    float c2, float c3) {
  multiply(Operation::multiply_f16, d0, d1, d2, d3, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3});
}

// ---- Copies ----

PTX void cp_async_cg_shared_global(u32 to, const void *from, u32 bytes, u32 there) {
  cudasim_copy(to, from, bytes, there);
}
PTX void cp_async_ca_shared_global(u32 to, const void *from, u32 bytes, u32 there) {
  cudasim_copy(to, from, bytes, there);
}
PTX void cp_async_commit_group() { cudasim_end_copies(); }
PTX void cp_async_wait_group(u32 running) { cudasim_wait_copies(running); }

PTX void prefetch_tensormap(const void *) {}
PTX void cp_async_bulk_tensor_2d_shared_cluster_global_tile_mbarrier_complete_tx_bytes(
    u32 to, const void *map, int column, int row, u32 barrier) {
  cudasim_fetch_box(to, map, u32(column), u32(row), barrier);
}
PTX void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(
    u32 to, const void *from, u32 bytes, u32 barrier) {
  cudasim_fetch_bytes(to, from, bytes, barrier);
}
// How writes become visible to others, and to the copy engine and the tensor cores, is not modelled.
PTX void fence_proxy_async_shared_cta() {}
PTX void fence_acq_rel_gpu() {}

// ---- Barriers ----

PTX void bar_sync(u32 id, u32 threads) { cudasim_sync_block(id, threads); }
PTX void bar_arrive(u32 id, u32 threads) { cudasim_arrive_at_block(id, threads); }
PTX void mbarrier_init_shared_cta_b64(u32 barrier, u32 arrivals) { cudasim_init_barrier(barrier, arrivals); }
PTX void fence_mbarrier_init_release_cluster() { cudasim_fence_barrier_init(); }
PTX void mbarrier_arrive_shared_cta_b64(u32 barrier) { cudasim_arrive(barrier, 0); }
PTX void mbarrier_arrive_expect_tx_shared_cta_b64(u32 barrier, u32 bytes) { cudasim_arrive(barrier, bytes); }
// Tried until the phase is over: the loop around it is left out.
PTX void mbarrier_try_wait_parity_shared_cta_b64(u32 barrier, u32 parity) { cudasim_wait(barrier, parity); }

// ---- Registers ----

constexpr void check_count(u32 registers) {
  if (registers % 8 || registers < 24 || registers > 256) __builtin_trap();
}
PTX void setmaxnreg_dec_sync_aligned_u32(u32 registers) { check_count(registers); }
PTX void setmaxnreg_inc_sync_aligned_u32(u32 registers) { check_count(registers); }

// ---- Clusters ----

PTX u32 cluster_ctarank() { return cudasim_cluster_rank(); }
template <typename T>
PTX void mov_u32(T &to, u32 from) {
  to = T(from);
}
PTX void barrier_cluster_arrive_release_aligned() { cudasim_arrive_at_cluster(); }
PTX void barrier_cluster_wait_acquire_aligned() { cudasim_wait_for_cluster(); }
PTX void mapa_shared_cluster_u32(u32 &to, u32 address, u32 rank) { to = cudasim_peer_address(address, rank); }
PTX void st_shared_cluster_v4_f32(u32 to, float x, float y, float z, float w) {
  const float4 four = {x, y, z, w};
  cudasim_store_peer(to, &four, sizeof four);
}

// ---- Products of warpgroups ----

PTX void wgmma_fence_sync_aligned() { cudasim_begin_products(); }
PTX void wgmma_commit_group_sync_aligned() { cudasim_end_products(); }
PTX void wgmma_wait_group_sync_aligned(u32 pending) { cudasim_wait_products(pending); }

// Registers that follow one another in memory.
template <u32 count, typename... Rest>
PTX float *span(float &first, Rest &...rest) {
  static_assert(1 + sizeof...(rest) == count);
  float *next = &first;
  if (!(true && ... && (&rest == ++next))) __builtin_trap();
  return &first;
}
struct Registers {
  u32 of[4];
};

// sums[64, columns] (+)= a b over 16 values of K.
template <u32 columns, bool bf16>
PTX void wgmma(float *sums, u64 a, u64 b, bool adds, int sign_a, int sign_b, int along_m, int along_n) {
  if (sign_a != 1 || sign_b != 1) __builtin_trap();
  cudasim_product(sums, {a, b, {}, columns, bf16, false, adds, along_m != 0, along_n != 0});
}
template <u32 columns, bool bf16>
PTX void wgmma(float *sums, const Registers &a, u64 b, bool adds, int sign_a, int sign_b, int along_n) {
  if (sign_a != 1 || sign_b != 1) __builtin_trap();
  cudasim_product(sums, {0, b, {a.of[0], a.of[1], a.of[2], a.of[3]}, columns, bf16, true, adds, false, along_n != 0});
}

}  // namespace ptx
