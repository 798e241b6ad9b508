// What the experiments of the report share: 32x32 tiles of a product in one simdgroup, as section 2 describes them.
// Sizes are multiples of the tile; nothing is checked, masked or skipped. The engine's products (gemm.h) began like
// this and will change; these stay what was measured.
#pragma once
#include <metal_simdgroup_matrix>
#include <metal_stdlib>
using namespace metal;

constant constexpr uint TILE = 32;

struct Dimensions {
  uint m, n, k;
};

template <typename T>
using Matrix = simdgroup_matrix<T, 8, 8>;

// Matrices are named one by one and never reached by a loop's index. Whether an array of them ends in registers or in
// memory is up to the compiler, and it may decide so for one element type and otherwise for another.
template <typename T>
struct Strip {  // operands of a K-step, or a row of accumulators
  Matrix<T> m0, m1, m2, m3;
};

template <typename T>
struct Tile {  // 32x32: sixteen accumulators
  Strip<T> r0, r1, r2, r3;
};

template <typename T>
METAL_FUNC void clear(thread Strip<T> &strip) {
  strip.m0 = make_filled_simdgroup_matrix<T, 8, 8>(T(0));
  strip.m1 = make_filled_simdgroup_matrix<T, 8, 8>(T(0));
  strip.m2 = make_filled_simdgroup_matrix<T, 8, 8>(T(0));
  strip.m3 = make_filled_simdgroup_matrix<T, 8, 8>(T(0));
}

template <typename T>
METAL_FUNC void clear(thread Tile<T> &tile) {
  clear(tile.r0);
  clear(tile.r1);
  clear(tile.r2);
  clear(tile.r3);
}

// Four 8x8 matrices, `step` elements from one to the next, in device or threadgroup memory.
template <bool transposed, typename T, typename Pointer>
METAL_FUNC void load(thread Strip<T> &strip, Pointer from, uint stride, uint step) {
  simdgroup_load(strip.m0, from, stride, ulong2(0, 0), transposed);
  simdgroup_load(strip.m1, from + step, stride, ulong2(0, 0), transposed);
  simdgroup_load(strip.m2, from + 2 * step, stride, ulong2(0, 0), transposed);
  simdgroup_load(strip.m3, from + 3 * step, stride, ulong2(0, 0), transposed);
}

template <typename T, typename S>
METAL_FUNC void multiply_add(thread Strip<S> &sum, thread const Matrix<T> &a, thread const Strip<T> &b) {
  simdgroup_multiply_accumulate(sum.m0, a, b.m0, sum.m0);
  simdgroup_multiply_accumulate(sum.m1, a, b.m1, sum.m1);
  simdgroup_multiply_accumulate(sum.m2, a, b.m2, sum.m2);
  simdgroup_multiply_accumulate(sum.m3, a, b.m3, sum.m3);
}

// sum += a b over eight of K: a holds four blocks of rows, b four blocks of columns.
template <typename T, typename S>
METAL_FUNC void multiply_add(thread Tile<S> &sum, thread const Strip<T> &a, thread const Strip<T> &b) {
  multiply_add(sum.r0, a.m0, b);
  multiply_add(sum.r1, a.m1, b);
  multiply_add(sum.r2, a.m2, b);
  multiply_add(sum.r3, a.m3, b);
}

// The report's nn, without its output: `a` begins at the tile's first row, `b` at its first column.
template <typename T, typename S>
METAL_FUNC void multiply_nn(thread Tile<S> &sum, device const T *a, device const T *b, Dimensions d) {
  for (uint k = 0; k < d.k; k += 8) {
    Strip<T> rows, columns;
    load<false>(rows, a + k, d.k, 8 * d.k);
    load<false>(columns, b + k * d.n, d.n, 8);
    multiply_add(sum, rows, columns);
  }
}

// In the accumulators' own type, to device or threadgroup memory.
template <typename T, typename Pointer>
METAL_FUNC void store(thread const Strip<T> &strip, Pointer to, uint stride) {
  simdgroup_store(strip.m0, to, stride);
  simdgroup_store(strip.m1, to + 8, stride);
  simdgroup_store(strip.m2, to + 16, stride);
  simdgroup_store(strip.m3, to + 24, stride);
}

template <typename T, typename Pointer>
METAL_FUNC void store(thread const Tile<T> &tile, Pointer to, uint stride) {
  store(tile.r0, to, stride);
  store(tile.r1, to + 8 * stride, stride);
  store(tile.r2, to + 16 * stride, stride);
  store(tile.r3, to + 24 * stride, stride);
}

// The report's output: the accumulators go to threadgroup memory, and from there, converted, to device memory.
template <typename S, typename T>
METAL_FUNC void store_staged(thread const Tile<S> &tile, threadgroup S *stage, device T *to, uint stride, uint lane) {
  store(tile, stage, TILE);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (uint row = 0; row < TILE; row++) to[row * stride + lane] = T(stage[row * TILE + lane]);
}
