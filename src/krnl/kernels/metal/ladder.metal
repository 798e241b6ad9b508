// Section 3 of the report: c = a bᵀ with b [n, k], from the obvious product to the one whose staging is vectorised.
#include "experiment.h"

// Reads b where it lies, by transposing loads.
kernel void nt_naive_f16(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                         device half *c [[buffer(2)]], constant Dimensions &size [[buffer(3)]],
                         uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float stage[TILE * TILE];
  const Dimensions d = size;
  const uint row = group.y * TILE, column = group.x * TILE;
  Tile<float> sum;
  clear(sum);
  for (uint k = 0; k < d.k; k += 8) {
    Strip<half> rows, columns;
    load<false>(rows, a + row * d.k + k, d.k, 8 * d.k);
    load<true>(columns, b + column * d.k + k, d.k, 8 * d.k);
    multiply_add(sum, rows, columns);
  }
  store_staged(sum, stage, c + row * d.n + column, d.n, lane);
}

// The four sub-steps between two stagings: `a` at the tile's first row, `staged` [TILE, TILE] of k and columns.
METAL_FUNC void multiply_staged(thread Tile<float> &sum, device const half *a, threadgroup const half *staged,
                                Dimensions d) {
  for (uint k = 0; k < TILE; k += 8) {
    Strip<half> rows, columns;
    load<false>(rows, a + k, d.k, 8 * d.k);
    load<false>(columns, staged + k * TILE, TILE, 8);
    multiply_add(sum, rows, columns);
  }
}

// One value at a time: neighbouring lanes read neighbouring values, and write them transposed.
kernel void nt_scalar_f16(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                          device half *c [[buffer(2)]], constant Dimensions &size [[buffer(3)]],
                          uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float stage[TILE * TILE];
  threadgroup half staged[TILE * TILE];
  const Dimensions d = size;
  const uint row = group.y * TILE, column = group.x * TILE;
  Tile<float> sum;
  clear(sum);
  for (uint k = 0; k < d.k; k += TILE) {
    device const half *from = b + column * d.k + k + lane;
    for (uint i = 0; i < TILE; i++) staged[lane * TILE + i] = from[i * d.k];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    multiply_staged(sum, a + row * d.k + k, staged, d);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  store_staged(sum, stage, c + row * d.n + column, d.n, lane);
}

// Four values at a time, staged as they lie in b; the loads from threadgroup memory transpose.
kernel void nt_natural_f16(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                           device half *c [[buffer(2)]], constant Dimensions &size [[buffer(3)]],
                           uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float stage[TILE * TILE];
  threadgroup half4 vectors[TILE * TILE / 4];
  threadgroup const half *staged = (threadgroup const half *)vectors;
  const Dimensions d = size;
  const uint row = group.y * TILE, column = group.x * TILE;
  Tile<float> sum;
  clear(sum);
  for (uint k = 0; k < d.k; k += TILE) {
    device const half4 *from = (device const half4 *)(b + (column + lane) * d.k + k);
    for (uint i = 0; i < TILE / 4; i++) vectors[lane * (TILE / 4) + i] = from[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint kk = 0; kk < TILE; kk += 8) {
      Strip<half> rows, columns;
      load<false>(rows, a + row * d.k + k + kk, d.k, 8 * d.k);
      load<true>(columns, staged + kk, TILE, 8 * TILE);
      multiply_add(sum, rows, columns);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  store_staged(sum, stage, c + row * d.n + column, d.n, lane);
}

// Four values at a time, transposed by the writes to threadgroup memory; `depth` of K between two barriers. Each lane
// stages one column of the tile.
template <uint depth>
kernel void nt_vector(device const half *a [[buffer(0)]], device const half *b [[buffer(1)]],
                      device half *c [[buffer(2)]], constant Dimensions &size [[buffer(3)]],
                      uint2 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float stage[TILE * TILE];
  threadgroup half staged[depth * TILE];
  const Dimensions d = size;
  const uint row = group.y * TILE, column = group.x * TILE;
  Tile<float> sum;
  clear(sum);
  for (uint k = 0; k < d.k; k += depth) {
    device const half4 *from = (device const half4 *)(b + (column + lane) * d.k + k);
    for (uint i = 0; i < depth / 4; i++) {
      const half4 values = from[i];
      staged[(4 * i + 0) * TILE + lane] = values.x;
      staged[(4 * i + 1) * TILE + lane] = values.y;
      staged[(4 * i + 2) * TILE + lane] = values.z;
      staged[(4 * i + 3) * TILE + lane] = values.w;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint kk = 0; kk < depth; kk += TILE) {
      multiply_staged(sum, a + row * d.k + k + kk, staged + kk * TILE, d);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  store_staged(sum, stage, c + row * d.n + column, d.n, lane);
}

#define VECTOR(name, depth)                                   \
  template [[host_name(name)]] kernel void nt_vector<depth>(  \
      device const half *, device const half *, device half *, constant Dimensions &, uint2, uint);

VECTOR("nt_vector_f16", 32)
VECTOR("nt_vector_k64_f16", 64)
