// Sections 2 and 4 of the report: how a tile leaves the registers, and larger tiles. All are of half and float.
#include "experiment.h"

// The baseline. 4 KB of threadgroup memory, for the output alone.
kernel void nn_staged_f16(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                          device half *c [[buffer(2)]], constant Dimensions &size [[buffer(3)]],
                          uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float stage[TILE * TILE];
  const Dimensions d = size;
  const uint row = group.y * TILE, column = group.x * TILE;
  Tile<float> sum;
  clear(sum);
  multiply_nn(sum, a + row * d.k, b + column, d);
  store_staged(sum, stage, c + row * d.n + column, d.n, lane);
}

// a is [k, m].
kernel void tn_staged_f16(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                          device half *c [[buffer(2)]], constant Dimensions &size [[buffer(3)]],
                          uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float stage[TILE * TILE];
  const Dimensions d = size;
  const uint row = group.y * TILE, column = group.x * TILE;
  Tile<float> sum;
  clear(sum);
  for (uint k = 0; k < d.k; k += 8) {
    Strip<half> rows, columns;
    load<true>(rows, a + k * d.m + row, d.m, 8);
    load<false>(columns, b + k * d.n + column, d.n, 8);
    multiply_add(sum, rows, columns);
  }
  store_staged(sum, stage, c + row * d.n + column, d.n, lane);
}

// A float tensor, straight from the accumulators.
kernel void nn_float_output_f16(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                                device float *c [[buffer(2)]], constant Dimensions &size [[buffer(3)]],
                                uint2 group [[threadgroup_position_in_grid]]) {
  const Dimensions d = size;
  const uint row = group.y * TILE, column = group.x * TILE;
  Tile<float> sum;
  clear(sum);
  multiply_nn(sum, a + row * d.k, b + column, d);
  store(sum, c + row * d.n + column, d.n);
}

METAL_FUNC void store_converted(thread Matrix<float> &matrix, device half *to) {
  *(device half2 *)to = half2(float2(matrix.thread_elements()[0], matrix.thread_elements()[1]));
}

METAL_FUNC void store_converted(thread Strip<float> &strip, device half *to) {
  store_converted(strip.m0, to);
  store_converted(strip.m1, to + 8);
  store_converted(strip.m2, to + 16);
  store_converted(strip.m3, to + 24);
}

// A half tensor, converted in registers: a lane holds two neighbouring elements of every 8x8 matrix.
kernel void nn_half_output_f16(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                               device half *c [[buffer(2)]], constant Dimensions &size [[buffer(3)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               uint lane [[thread_index_in_simdgroup]]) {
  const Dimensions d = size;
  const uint row = group.y * TILE, column = group.x * TILE;
  Tile<float> sum;
  clear(sum);
  multiply_nn(sum, a + row * d.k, b + column, d);
  const uint lane_row = lane / 16 * 4 + lane / 2 % 4, lane_column = lane / 8 % 2 * 4 + lane % 2 * 2;
  device half *to = c + (row + lane_row) * d.n + column + lane_column;
  store_converted(sum.r0, to);
  store_converted(sum.r1, to + 8 * d.n);
  store_converted(sum.r2, to + 16 * d.n);
  store_converted(sum.r3, to + 24 * d.n);
}

// The baseline with four values to a store.
kernel void nn_vector_output_f16(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                                 device half *c [[buffer(2)]], constant Dimensions &size [[buffer(3)]],
                                 uint2 group [[threadgroup_position_in_grid]],
                                 uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 stage[TILE * TILE / 4];
  const Dimensions d = size;
  const uint row = group.y * TILE, column = group.x * TILE;
  Tile<float> sum;
  clear(sum);
  multiply_nn(sum, a + row * d.k, b + column, d);
  store(sum, (threadgroup float *)stage, TILE);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = lane; i < TILE * TILE / 4; i += 32) {
    device half *to = c + (row + i / 8) * d.n + column + i % 8 * 4;
    *(device half4 *)to = half4(stage[i]);
  }
}

// Two tiles side by side: 32 accumulators. The operands are not staged; the two halves leave through one output tile.
kernel void nn_32x64_f16(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                         device half *c [[buffer(2)]], constant Dimensions &size [[buffer(3)]],
                         uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float stage[TILE * TILE];
  const Dimensions d = size;
  const uint row = group.y * TILE, column = group.x * 2 * TILE;
  Tile<float> left, right;
  clear(left);
  clear(right);
  for (uint k = 0; k < d.k; k += 8) {
    Strip<half> rows, columns;
    load<false>(rows, a + row * d.k + k, d.k, 8 * d.k);
    load<false>(columns, b + k * d.n + column, d.n, 8);
    multiply_add(left, rows, columns);
    load<false>(columns, b + k * d.n + column + TILE, d.n, 8);
    multiply_add(right, rows, columns);
  }
  store_staged(left, stage, c + row * d.n + column, d.n, lane);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  store_staged(right, stage, c + row * d.n + column + TILE, d.n, lane);
}

constant constexpr uint WIDE = 64;   // rows and columns of a threadgroup of four simdgroups
constant constexpr uint DEPTH = 16;  // of K, staged at a time

// The product of 64x64 up to its output: sum is the 32x32 tile of this simdgroup, at (row, column) of the 64x64. The
// report does not say how its operands were copied; here it is done four values at a time, so that the copying is not
// what a comparison of tile sizes measures.
METAL_FUNC void multiply_wide(thread Tile<float> &sum, device const half *a, device const half *b,
                              Dimensions d, threadgroup half4 *staged_a, threadgroup half4 *staged_b,
                              uint row, uint column, uint index) {
  threadgroup const half *rows_from = (threadgroup const half *)staged_a + row * DEPTH;
  threadgroup const half *columns_from = (threadgroup const half *)staged_b + column;
  for (uint k = 0; k < d.k; k += DEPTH) {
    for (uint i = index; i < WIDE * DEPTH / 4; i += 128) {
      staged_a[i] = *(device const half4 *)(a + i / (DEPTH / 4) * d.k + k + i % (DEPTH / 4) * 4);
      staged_b[i] = *(device const half4 *)(b + (k + i / (WIDE / 4)) * d.n + i % (WIDE / 4) * 4);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint kk = 0; kk < DEPTH; kk += 8) {
      Strip<half> rows, columns;
      load<false>(rows, rows_from + kk, DEPTH, 8 * DEPTH);
      load<false>(columns, columns_from + kk * WIDE, WIDE, 8);
      multiply_add(sum, rows, columns);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// 20 KB: 4 of operands, and an output tile of 32x32 floats for each simdgroup.
kernel void nn_64x64_f16(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                         device half *c [[buffer(2)]], constant Dimensions &size [[buffer(3)]],
                         uint2 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
                         uint quarter [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup half4 staged_a[WIDE * DEPTH / 4], staged_b[DEPTH * WIDE / 4];
  threadgroup float stage[4 * TILE * TILE];
  const Dimensions d = size;
  const uint row = quarter / 2 * TILE, column = quarter % 2 * TILE;
  device half *to = c + (group.y * WIDE + row) * d.n + group.x * WIDE + column;
  Tile<float> sum;
  clear(sum);
  multiply_wide(sum, a + group.y * WIDE * d.k, b + group.x * WIDE, d, staged_a, staged_b, row, column, index);
  store_staged(sum, stage + quarter * TILE * TILE, to, d.n, lane);
}

// One 8x8 matrix at a time through the 256 bytes at `stage`.
METAL_FUNC void store_small(thread const Matrix<float> &matrix, threadgroup float *stage, device half *to, uint stride,
                            uint lane) {
  simdgroup_store(matrix, stage, 8);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = lane; i < 64; i += 32) to[i / 8 * stride + i % 8] = half(stage[i]);
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

METAL_FUNC void store_small(thread const Strip<float> &strip, threadgroup float *stage, device half *to, uint stride,
                            uint lane) {
  store_small(strip.m0, stage, to, stride, lane);
  store_small(strip.m1, stage, to + 8, stride, lane);
  store_small(strip.m2, stage, to + 16, stride, lane);
  store_small(strip.m3, stage, to + 24, stride, lane);
}

// 5 KB: the same with an output tile of 8x8 floats for each simdgroup.
kernel void nn_64x64_small_f16(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                               device half *c [[buffer(2)]], constant Dimensions &size [[buffer(3)]],
                               uint2 group [[threadgroup_position_in_grid]],
                               uint index [[thread_index_in_threadgroup]],
                               uint quarter [[simdgroup_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
  threadgroup half4 staged_a[WIDE * DEPTH / 4], staged_b[DEPTH * WIDE / 4];
  threadgroup float stages[4 * 64];
  const Dimensions d = size;
  const uint row = quarter / 2 * TILE, column = quarter % 2 * TILE;
  threadgroup float *stage = stages + quarter * 64;
  device half *to = c + (group.y * WIDE + row) * d.n + group.x * WIDE + column;
  Tile<float> sum;
  clear(sum);
  multiply_wide(sum, a + group.y * WIDE * d.k, b + group.x * WIDE, d, staged_a, staged_b, row, column, index);
  store_small(sum.r0, stage, to, d.n, lane);
  store_small(sum.r1, stage, to + 8 * d.n, d.n, lane);
  store_small(sum.r2, stage, to + 16 * d.n, d.n, lane);
  store_small(sum.r3, stage, to + 24 * d.n, d.n, lane);
}
