// Kernels that are wrong at the line marked `here`, where they collide with the line marked `earlier`.
#include <metal_stdlib>
using namespace metal;

kernel void reads_beyond(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                         uint i [[thread_position_in_grid]]) {
  y[i] = x[i + 1]; // reads_beyond here
}

kernel void writes_before(device float *y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  y[int(i) - 1] = 1.0f; // writes_before here
}

kernel void leaves_array(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float a[32], b[32];
  a[t] = 1.0f;
  b[t] = 2.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = (&a[0])[t + 1] + b[t]; // leaves_array here
}

kernel void forgets_barrier(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float a[64];
  a[t] = float(t); // forgets_barrier earlier
  y[t] = a[63 - t]; // forgets_barrier here
}

kernel void overwrites_early(device float *y [[buffer(0)]],
                             uint t [[thread_index_in_threadgroup]]) {
  threadgroup float a[64];
  for (int k = 0; k < 2; k++) {
    a[t] = float(t + k); // overwrites_early here
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[t] = a[63 - t]; // overwrites_early earlier
  }
}

kernel void orders_nothing(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float a[64];
  a[t] = float(t); // orders_nothing earlier
  threadgroup_barrier(mem_flags::mem_none);
  y[t] = a[63 - t]; // orders_nothing here
}

kernel void orders_other_memory(device float *y [[buffer(0)]],
                                uint t [[thread_index_in_threadgroup]]) {
  y[t] = float(t); // orders_other_memory earlier
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float z = y[t ^ 1]; // orders_other_memory here
  threadgroup_barrier(mem_flags::mem_device);
  y[t] = z;
}

kernel void trusts_simdgroup_barrier(device float *y [[buffer(0)]],
                                     uint t [[thread_index_in_threadgroup]]) {
  threadgroup float a[64];
  a[t] = float(t); // trusts_simdgroup_barrier earlier
  simdgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = a[63 - t]; // trusts_simdgroup_barrier here
}

kernel void trusts_lockstep(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float a[32];
  a[t] = float(t); // trusts_lockstep earlier
  y[t] = a[31 - t] + simd_sum(1.0f); // trusts_lockstep here
}

kernel void shares_output(device float *y [[buffer(0)]], uint g [[threadgroup_position_in_grid]],
                          uint t [[thread_index_in_threadgroup]]) {
  y[t + g] = 1.0f; // shares_output here earlier
}

kernel void reads_neighbour(device float *y [[buffer(0)]], uint i [[thread_position_in_grid]]) {
  const float right = y[i + 1]; // reads_neighbour earlier
  threadgroup_barrier(mem_flags::mem_device);
  y[i] = right; // reads_neighbour here
}

kernel void mixes_atomics(device atomic_uint *n [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  atomic_fetch_add_explicit(&n[t & 3], 1, memory_order_relaxed); // mixes_atomics earlier
  if (t == 9) ((device uint *)n)[2] = 0; // mixes_atomics here
}

kernel void forgets_to_write(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float a[64];
  if (t != 5) a[t] = 1.0f;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = a[63 - t]; // forgets_to_write here
}

kernel void misaligns(device char *x [[buffer(0)]], device uint *y [[buffer(1)]],
                      uint t [[thread_index_in_threadgroup]]) {
  y[t] = *(device uint *)(x + 4 * t + 2); // misaligns here
}

kernel void diverges_at_barrier(device float *y [[buffer(0)]],
                                uint t [[thread_index_in_threadgroup]]) {
  if (t >= 32) return;
  threadgroup_barrier(mem_flags::mem_device); // diverges_at_barrier here
  y[t] = 1.0f;
}

kernel void meets_elsewhere(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  if (t < 32) {
    threadgroup_barrier(mem_flags::mem_device); // meets_elsewhere earlier
    y[t] = 1.0f;
  } else {
    threadgroup_barrier(mem_flags::mem_device); // meets_elsewhere here
    y[t] = 2.0f;
  }
}

kernel void diverges_in_simdgroup(device float *y [[buffer(0)]],
                                  uint t [[thread_index_in_threadgroup]]) {
  float s = 0.0f;
  if (t % 2 == 0) s = simd_sum(1.0f); // diverges_in_simdgroup here
  y[t] = s;
  threadgroup_barrier(mem_flags::mem_device);
}

kernel void diverges_three_ways(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  float sum = 0.0f;
  if (t % 3 == 0)
    sum = simd_sum(1.0f);
  else if (t % 3 == 1)
    sum = simd_sum(10.0f);
  else
    sum = simd_sum(100.0f);
  y[t] = sum + simd_sum(10000.0f);
}

kernel void diverges_at_simdgroup_barrier(device float *y [[buffer(0)]],
                                          uint t [[thread_index_in_threadgroup]]) {
  if (t < 7) simdgroup_barrier(mem_flags::mem_device); // diverges_at_simdgroup_barrier here
  threadgroup_barrier(mem_flags::mem_device);
  y[t] = 1.0f;
}

kernel void splits_product(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  simdgroup_float8x8 a(1.0f), b(2.0f), c(0.0f);
  if (t != 3) simdgroup_multiply_accumulate(c, a, b, c); // splits_product here
  threadgroup_barrier(mem_flags::mem_none);
  simdgroup_store(c, y, 8);
}

kernel void multiplies_in_small(device float *y [[buffer(0)]]) {
  simdgroup_float8x8 a(1.0f), b(2.0f), c(0.0f);
  simdgroup_multiply_accumulate(c, a, b, c); // multiplies_in_small here
  simdgroup_store(c, y, 8);
}

kernel void waits_forever(device atomic_uint *y [[buffer(0)]]) {
  while (atomic_load_explicit(y, memory_order_relaxed) == 0) // waits_forever here
    ;
}

kernel void follows_nothing(device ulong *x [[buffer(0)]], device float *y [[buffer(1)]]) {
  y[0] = *(device float *)x[0]; // follows_nothing here
}

kernel void divides_by_zero(device int *x [[buffer(0)]]) {
  x[1] = x[0] / x[1]; // divides_by_zero here
}

kernel void takes_too_much(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup float a[4096];
  a[t] = 1.0f;
  threadgroup float b[4100]; // takes_too_much here
  b[t] = 1.0f;
  y[t] = a[t] + b[t];
}

kernel void takes_argument(threadgroup float *a [[threadgroup(0)]],
                           uint t [[thread_index_in_threadgroup]]) {
  a[t + 1] = 1.0f; // takes_argument here
}

kernel void writes_input(device float *x [[buffer(0)]]) {
  x[0] = 1.0f; // writes_input here
}

kernel void casts_const_away(device const float *x [[buffer(0)]]) {
  ((device float *)x)[0] = 1.0f; // casts_const_away here
}

kernel void lends_own(device float *y [[buffer(0)]], uint t [[thread_index_in_threadgroup]]) {
  threadgroup ulong address[1];
  float own[2] = {float(t), 1.0f};
  if (t == 0) address[0] = (ulong)&own[0];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  y[t] = *(thread float *)address[0]; // lends_own here
}

kernel void indexes_beyond(device const float *x [[buffer(0)]], device float *y [[buffer(1)]],
                           uint t [[thread_index_in_threadgroup]]) {
  float own[4];
  for (int i = 0; i < 4; i++) own[i] = x[i];
  y[t] = own[t & 7]; // indexes_beyond here
}

__attribute__((noinline)) float deep(device const float *x, int n) {
  float own[64];
  for (int i = 0; i < 64; i++) own[i] = x[i & 1] + float(n);
  return n == 0 ? own[5] : deep(x, n - 1) + own[n & 63];
}
kernel void falls_deep(device float *x [[buffer(0)]]) { x[0] = deep(x, int(x[1])); }

kernel void writes_bytes(device uchar *y [[buffer(0)]], threadgroup uchar *a [[threadgroup(0)]],
                         uint t [[thread_index_in_threadgroup]]) {
  a[t] = uchar(t);
  y[t] = a[t];
}

kernel void reads_bytes(device uchar *y [[buffer(0)]], threadgroup uchar *a [[threadgroup(0)]],
                        uint t [[thread_index_in_threadgroup]]) {
  a[t] = uchar(t);
  threadgroup_barrier(mem_flags::mem_none);
  y[t] = a[63 - t];
}
