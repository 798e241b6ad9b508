// Section 1 of the report: one nn product whose element types alone differ. Accumulators of half, operands of bfloat
// and the like are what is asked about here; the engine's kernels have float accumulators and no bfloat.
#include "experiment.h"

template <typename T, typename S>
kernel void types(device const T *a [[buffer(0)]], device const T *b [[buffer(1)]], device T *c [[buffer(2)]],
                  constant Dimensions &size [[buffer(3)]], uint2 group [[threadgroup_position_in_grid]],
                  uint lane [[thread_index_in_simdgroup]]) {
  threadgroup S stage[TILE * TILE];
  const Dimensions d = size;
  const uint row = group.y * TILE, column = group.x * TILE;
  Tile<S> sum;
  clear(sum);
  multiply_nn(sum, a + row * d.k, b + column, d);
  store_staged(sum, stage, c + row * d.n + column, d.n, lane);
}

#define TYPES(operand, T, accumulator, S)                                              \
  template [[host_name("types_" #operand "_" #accumulator)]] kernel void types<T, S>(  \
      device const T *, device const T *, device T *, constant Dimensions &, uint2, uint);

TYPES(f16, half, f32, float)
TYPES(f16, half, f16, half)
TYPES(f32, float, f32, float)
TYPES(bf16, bfloat, f32, float)
