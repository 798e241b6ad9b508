// Kernels that are right, whatever the order of threads.
#include <metal_stdlib>
using namespace metal;

constant bool has_bias [[function_constant(0)]];
constant int scale [[function_constant(1)]];
constant bool wide = is_function_constant_defined(scale) && scale > 1;

kernel void total(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                  uint g [[threadgroup_position_in_grid]], uint t [[thread_index_in_threadgroup]],
                  uint n [[threads_per_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                  uint simdgroup [[simdgroup_index_in_threadgroup]],
                  uint simdgroups [[simdgroups_per_threadgroup]]) {
  threadgroup float partial[32];
  for (int round = 0; round < 3; round++) {
    const float sum = simd_sum(x[g * n + t]);
    if (lane == 0) partial[simdgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (t == 0) {
      float all = 0.0f;
      for (uint i = 0; i < simdgroups; i++) all += partial[i];
      y[g] = all;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Each simdgroup turns its 32 values around, twice.
kernel void reverse(device const int *x [[buffer(0)]], device int *y [[buffer(1)]],
                    uint i [[thread_position_in_grid]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup int a[128];
  a[t] = x[i];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  const int other = a[t ^ 31];
  simdgroup_barrier(mem_flags::mem_threadgroup);
  a[t] = other;
  y[i] = simd_shuffle_xor(a[t], ushort(31)) + simd_broadcast(0, 5);
}

kernel void product(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                    device float *c [[buffer(2)]], constant uint &k [[buffer(3)]],
                    device const float *bias [[buffer(4), function_constant(has_bias)]],
                    uint2 tile [[threadgroup_position_in_grid]], uint2 tiles [[threadgroups_per_grid]],
                    uint lane [[thread_index_in_threadgroup]]) {
  threadgroup half staged[8 * 8];
  simdgroup_float8x8 sums(0.0f), twice(0.0f);
  for (uint i = 0; i < k; i += 8) {
    simdgroup_half8x8 left, right;
    simdgroup_load(left, a + tile.y * 8 * k + i, k);
    for (uint j = lane; j < 64; j += 32) staged[j] = b[(tile.x * 8 + j % 8) * k + i + j / 8];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_load(right, staged, 8);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    simdgroup_multiply_accumulate(sums, left, right, sums);
  }
  if (wide) {
    simdgroup_multiply_accumulate(twice, sums, simdgroup_float8x8(float(scale)), twice);
    sums = twice;
  }
  if (has_bias) {
    thread auto &mine = sums.thread_elements();
    mine += bias[tile.x];
  }
  simdgroup_store(sums, c + tile.y * 8 * tiles.x * 8 + tile.x * 8, tiles.x * 8);
}

kernel void leaves_early(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                         constant uint &live [[buffer(2)]], uint i [[thread_position_in_grid]]) {
  if (i >= live) return;
  y[i] = simd_max(x[i]);
}

kernel void counts(device atomic_uint *n [[buffer(0)]], device const uint *x [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  threadgroup atomic_uint odd;
  if (i % 64 == 0) atomic_store_explicit(&odd, 0, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  atomic_fetch_add_explicit(&odd, x[i] & 1, memory_order_relaxed);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i % 64 == 0)
    atomic_fetch_add_explicit(n, atomic_load_explicit(&odd, memory_order_relaxed), memory_order_relaxed);
}

kernel void arrives(device atomic_uint *n [[buffer(0)]], device uint *order [[buffer(1)]],
                    uint i [[thread_position_in_grid]]) {
  order[i] = atomic_fetch_add_explicit(n, 1, memory_order_relaxed);
}

kernel void halves(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                   uint i [[thread_position_in_grid]]) {
  y[i] = x[i] * 0.5f;
}
// Runs a program: what each thread does in each step, and the barrier that ends the step.
kernel void steps(device const uchar *program [[buffer(0)]], device const uchar *barriers [[buffer(1)]],
                  constant uint &count [[buffer(2)]], device uint *shared [[buffer(3)]],
                  device uint *y [[buffer(4)]], uint t [[thread_index_in_threadgroup]],
                  uint n [[threads_per_threadgroup]]) {
  threadgroup uint a[4];
  if (t < 4) a[t] = 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint sum = 0;
  for (uint s = 0; s < count; s++) {
    const uint action = program[s * n + t], cell = action & 3;
    if (action >> 2 == 1) sum += a[cell];
    if (action >> 2 == 2) a[cell] = t;
    if (action >> 2 == 3) sum += shared[cell];
    if (action >> 2 == 4) shared[cell] = t;
    const mem_flags flags = mem_flags(barriers[s] & 3);
    if (barriers[s] >> 2 == 1) simdgroup_barrier(flags);
    if (barriers[s] >> 2 == 2) threadgroup_barrier(flags);
  }
  y[t] = sum;
}

kernel void where(device uint *y [[buffer(0)]], uint2 at [[thread_position_in_grid]],
                  uint2 n [[threads_per_grid]], uint2 size [[threads_per_threadgroup]],
                  uint t [[thread_index_in_threadgroup]]) {
  y[at.y * n.x + at.x] = size.y * 1000 + size.x * 100 + t;
}
