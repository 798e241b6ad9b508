// Products of 32x32 tiles, as the report builds them: a threadgroup is one simdgroup and owns a tile of the output, in
// sixteen float accumulators of 8x8. For kernels of their own epilogue or batching:
//
//   Tile<float> sum;
//   clear(sum);
//   multiply_nn(sum, a, a_stride, b, b_stride, rows, columns, depth, aligned, lane);         // += a[m,k] b[k,n]
//   multiply_tn(sum, a, a_stride, b, b_stride, rows, columns, depth, aligned, lane);         // += a[k,m]ᵀ b[k,n]
//   multiply_nt(sum, a, a_stride, b, b_stride, rows, columns, depth, aligned, stage, lane);  // += a[m,k] b[n,k]ᵀ
//   store(sum, Output<half>{y, y_stride}, row, column, rows, columns, lane);                 // converted, to y[m,n]
//
// `a` and `b` point to the tile's first row, first column and first k; strides are the elements from a row in memory to
// the next. `rows` and `columns` say how much exists from the tile's first row and column on: more than 32 is fine, and
// nothing beyond is read or written. `depth` is how many k there are. Calls add up: a K loop that runs on over another
// pair of matrices is another call. All of this must be the same in the whole threadgroup.
// `aligned`: rows of a and b begin at multiples of four elements. In whole tiles that are aligned nothing is checked.
// `stage` is `threadgroup T stage[TILE * TILE]`; only nt needs one.
// a has the type of the activations T, in which products are formed. b may have another one S (weights: half, float, or
// ushort for bfloat16) and is converted on its way.
#pragma once
#include <metal_simdgroup_matrix>
#include <metal_stdlib>

#include "common.h"
using namespace metal;

constant constexpr uint TILE = 32;

template <typename T>
using Matrix = simdgroup_matrix<T, 8, 8>;

// Matrices are named one by one and never reached by a loop's index: an array of them may end in memory.
template <typename T>
struct Strip {  // 8x32 or 32x8
  Matrix<T> m0, m1, m2, m3;
};

template <typename T>
struct Tile {  // 32x32
  Strip<T> r0, r1, r2, r3;
};

METAL_FUNC void clear(thread Strip<float> &strip) {
  strip.m0 = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  strip.m1 = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  strip.m2 = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  strip.m3 = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
}

METAL_FUNC void clear(thread Tile<float> &tile) {
  clear(tile.r0);
  clear(tile.r1);
  clear(tile.r2);
  clear(tile.r3);
}

template <typename T>
METAL_FUNC void multiply_add(thread Strip<float> &sum, thread const Matrix<T> &a, thread const Strip<T> &b) {
  simdgroup_multiply_accumulate(sum.m0, a, b.m0, sum.m0);
  simdgroup_multiply_accumulate(sum.m1, a, b.m1, sum.m1);
  simdgroup_multiply_accumulate(sum.m2, a, b.m2, sum.m2);
  simdgroup_multiply_accumulate(sum.m3, a, b.m3, sum.m3);
}

// sum += a b over eight of k: a is four blocks of rows, b four blocks of columns.
template <typename T>
METAL_FUNC void multiply_add(thread Tile<float> &sum, thread const Strip<T> &a, thread const Strip<T> &b) {
  multiply_add(sum.r0, a.m0, b);
  multiply_add(sum.r1, a.m1, b);
  multiply_add(sum.r2, a.m2, b);
  multiply_add(sum.r3, a.m3, b);
}

// The same for the first rows of a tile: blocks without any are left out. A token that is alone needs a quarter.
template <typename T>
METAL_FUNC void multiply_add(thread Tile<float> &sum, thread const Strip<T> &a, thread const Strip<T> &b, uint rows) {
  multiply_add(sum.r0, a.m0, b);
  if (rows > 8) multiply_add(sum.r1, a.m1, b);
  if (rows > 16) multiply_add(sum.r2, a.m2, b);
  if (rows > 24) multiply_add(sum.r3, a.m3, b);
}

// ---- Operands that lie in memory as they are multiplied, or transposed as a whole ----

// Of an 8x8 matrix, a lane holds two neighbours of one row.
METAL_FUNC uint lane_row(uint lane) { return (lane >> 4 & 1) * 4 + (lane >> 1 & 3); }
METAL_FUNC uint lane_column(uint lane) { return (lane >> 3 & 1) * 4 + (lane & 1) * 2; }

METAL_FUNC uint remaining(uint size, uint taken) { return size > taken ? size - taken : 0; }

// Four blocks, `step` elements from one to the next. P points to T, in device or threadgroup memory.
template <bool transposed, typename T, typename P>
METAL_FUNC void load(thread Strip<T> &strip, P from, uint stride, uint step) {
  simdgroup_load(strip.m0, from, stride, ulong2(0, 0), transposed);
  simdgroup_load(strip.m1, from + step, stride, ulong2(0, 0), transposed);
  simdgroup_load(strip.m2, from + 2 * step, stride, ulong2(0, 0), transposed);
  simdgroup_load(strip.m3, from + 3 * step, stride, ulong2(0, 0), transposed);
}

// A block converted. Every lane fetches its own pair: each element is needed once, so that staging it for the others
// would only add instructions, of which section 3 of the report found too many.
template <typename T, typename S>
METAL_FUNC void load_converted(thread Matrix<T> &block, device const S *from, uint stride, uint lane) {
  const vec<S, 2> pair = *(device const vec<S, 2> *)(from + lane_row(lane) * stride + lane_column(lane));
  block.thread_elements()[0] = T(to_float(pair.x));
  block.thread_elements()[1] = T(to_float(pair.y));
}

// Four blocks of columns of b.
template <typename T>
METAL_FUNC void load_columns(thread Strip<T> &strip, device const T *from, uint stride, uint lane) {
  load<false>(strip, from, stride, 8);
}
template <typename T, typename S>
METAL_FUNC void load_columns(thread Strip<T> &strip, device const S *from, uint stride, uint lane) {
  load_converted(strip.m0, from, stride, lane);
  load_converted(strip.m1, from + 8, stride, lane);
  load_converted(strip.m2, from + 16, stride, lane);
  load_converted(strip.m3, from + 24, stride, lane);
}

// A block of which only some rows and columns exist; the rest are zeros. Strides are of the block's rows and columns.
template <typename T, typename S>
METAL_FUNC void load_edge(thread Matrix<T> &block, device const S *from, uint row_stride, uint column_stride, uint rows,
                          uint columns, uint lane) {
  const uint row = lane_row(lane), column = lane_column(lane);
  device const S *pair = from + row * row_stride + column * column_stride;
  const bool exists = row < rows;
  block.thread_elements()[0] = exists && column < columns ? T(to_float(pair[0])) : T(0.0f);
  block.thread_elements()[1] = exists && column + 1 < columns ? T(to_float(pair[column_stride])) : T(0.0f);
}

// Those of four blocks of rows of a that have any.
template <typename T>
METAL_FUNC void load_edge_rows(thread Strip<T> &strip, device const T *from, uint row_stride, uint column_stride,
                               uint rows, uint columns, uint lane) {
  load_edge(strip.m0, from, row_stride, column_stride, rows, columns, lane);
  if (rows > 8) load_edge(strip.m1, from + 8 * row_stride, row_stride, column_stride, rows - 8, columns, lane);
  if (rows > 16) load_edge(strip.m2, from + 16 * row_stride, row_stride, column_stride, rows - 16, columns, lane);
  if (rows > 24) load_edge(strip.m3, from + 24 * row_stride, row_stride, column_stride, rows - 24, columns, lane);
}

// Four blocks of columns of b.
template <typename T, typename S>
METAL_FUNC void load_edge_columns(thread Strip<T> &strip, device const S *from, uint stride, uint rows, uint columns,
                                  uint lane) {
  load_edge(strip.m0, from, stride, 1, rows, columns, lane);
  load_edge(strip.m1, from + 8, stride, 1, rows, remaining(columns, 8), lane);
  load_edge(strip.m2, from + 16, stride, 1, rows, remaining(columns, 16), lane);
  load_edge(strip.m3, from + 24, stride, 1, rows, remaining(columns, 24), lane);
}

// nn and tn.
template <bool transposed, typename T, typename S>
METAL_FUNC void multiply_in_place(thread Tile<float> &sum, device const T *a, uint a_stride, device const S *b,
                                  uint b_stride, uint rows, uint columns, uint depth, bool aligned, uint lane) {
  const uint row_stride = transposed ? 1 : a_stride, k_stride = transposed ? a_stride : 1;
  Strip<T> a_blocks, b_blocks;
  uint k = 0;
  if (aligned && rows >= TILE && columns >= TILE) {
    for (; k + 8 <= depth; k += 8, a += 8 * k_stride, b += 8 * b_stride) {
      load<transposed>(a_blocks, a, a_stride, 8 * row_stride);
      load_columns(b_blocks, b, b_stride, lane);
      multiply_add(sum, a_blocks, b_blocks);
    }
  }
  for (; k < depth; k += 8, a += 8 * k_stride, b += 8 * b_stride) {
    load_edge_rows(a_blocks, a, row_stride, k_stride, rows, depth - k, lane);
    load_edge_columns(b_blocks, b, b_stride, depth - k, columns, lane);
    multiply_add(sum, a_blocks, b_blocks, rows);
  }
}

template <typename T, typename S>
METAL_FUNC void multiply_nn(thread Tile<float> &sum, device const T *a, uint a_stride, device const S *b, uint b_stride,
                            uint rows, uint columns, uint depth, bool aligned, uint lane) {
  multiply_in_place<false>(sum, a, a_stride, b, b_stride, rows, columns, depth, aligned, lane);
}

template <typename T, typename S>
METAL_FUNC void multiply_tn(thread Tile<float> &sum, device const T *a, uint a_stride, device const S *b, uint b_stride,
                            uint rows, uint columns, uint depth, bool aligned, uint lane) {
  multiply_in_place<true>(sum, a, a_stride, b, b_stride, rows, columns, depth, aligned, lane);
}

// ---- nt: b is staged ----

// Every lane stages one column of the tile, which is a row in memory: 32 values, read by fours. They are scattered, so
// that lanes write side by side and the tile is read without transposing (the last rung of the report's section 3).
template <typename T, typename S>
METAL_FUNC void stage_column(threadgroup T *stage, device const S *row, uint lane) {
  device const vec<S, 4> *from = (device const vec<S, 4> *)row;
  for (uint i = 0; i < TILE / 4; i++) {
    const vec<S, 4> values = from[i];
    stage[(4 * i + 0) * TILE + lane] = T(to_float(values.x));
    stage[(4 * i + 1) * TILE + lane] = T(to_float(values.y));
    stage[(4 * i + 2) * TILE + lane] = T(to_float(values.z));
    stage[(4 * i + 3) * TILE + lane] = T(to_float(values.w));
  }
}

// The same where only values first ≤ i < last exist, which begin at `row`; the rest are zeros.
template <typename T, typename S>
METAL_FUNC void stage_edge(threadgroup T *stage, device const S *row, int first, int last, bool aligned, uint lane) {
  for (int i = 0; i < int(TILE); i += 4) {
    vec<T, 4> values = vec<T, 4>(T(0.0f));
    if (aligned && i >= first && i + 4 <= last) {
      values = vec<T, 4>(to_float(*(device const vec<S, 4> *)(row + (i - first))));
    } else {
      for (int j = 0; j < 4; j++)
        if (i + j >= first && i + j < last) values[j] = T(to_float(row[i + j - first]));
    }
    for (int j = 0; j < 4; j++) stage[(i + j) * TILE + lane] = values[j];
  }
}

template <typename T>
METAL_FUNC void multiply_staged(thread Tile<float> &sum, device const T *a, uint a_stride, threadgroup const T *stage) {
  Strip<T> a_blocks, b_blocks;
  for (uint k = 0; k < TILE; k += 8) {
    load<false>(a_blocks, a + k, a_stride, 8 * a_stride);
    load<false>(b_blocks, stage + k * TILE, TILE, 8);
    multiply_add(sum, a_blocks, b_blocks);
  }
}

// The same where only some rows and `depth` values of k exist.
template <typename T>
METAL_FUNC void multiply_staged(thread Tile<float> &sum, device const T *a, uint a_stride, threadgroup const T *stage,
                                uint rows, uint depth, uint lane) {
  Strip<T> a_blocks, b_blocks;
  for (uint k = 0; k < TILE && k < depth; k += 8) {
    load_edge_rows(a_blocks, a + k, a_stride, 1, rows, depth - k, lane);
    load<false>(b_blocks, stage + k * TILE, TILE, 8);
    multiply_add(sum, a_blocks, b_blocks, rows);
  }
}

// nt where lanes know their own columns of the tile: of this lane's, values first ≤ k < last exist, from `column` on.
// `whole`: all 32 rows and all values of all columns exist, so that only what whole steps leave of k is checked.
// A threadgroup is one simdgroup, whose barrier is enough.
template <typename T, typename S>
METAL_FUNC void multiply_columns(thread Tile<float> &sum, device const T *a, uint a_stride, device const S *column,
                                 uint first, uint last, uint rows, uint depth, bool whole, bool aligned,
                                 threadgroup T *stage, uint lane) {
  uint k = 0;
  if (whole && aligned) {
    for (; k + TILE <= depth; k += TILE) {
      stage_column(stage, column + k, lane);
      simdgroup_barrier(mem_flags::mem_threadgroup);
      multiply_staged(sum, a + k, a_stride, stage);
      simdgroup_barrier(mem_flags::mem_threadgroup);
    }
  }
  for (; k < depth; k += TILE) {
    // Inside the step, this lane's values begin at `begin` ≥ 0, or have begun before it.
    const int begin = max(int(first) - int(k), 0), end = int(last) - int(k);
    stage_edge(stage, column + remaining(k, first), begin, end, aligned, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    multiply_staged(sum, a + k, a_stride, stage, rows, depth - k, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
}

template <typename T, typename S>
METAL_FUNC void multiply_nt(thread Tile<float> &sum, device const T *a, uint a_stride, device const S *b, uint b_stride,
                            uint rows, uint columns, uint depth, bool aligned, threadgroup T *stage, uint lane) {
  multiply_columns(sum, a, a_stride, b + lane * b_stride, 0, lane < columns ? depth : 0, rows, depth,
                   rows >= TILE && columns >= TILE, aligned, stage, lane);
}

// ---- Output, straight from registers ----

// An epilogue is a struct and a function `finish` that does something with one element of the sum. This one converts.
template <typename T>
struct Output {
  device T *to;
  uint stride;
};

template <typename T>
METAL_FUNC void finish(thread const Output<T> &output, uint row, uint column, float value) {
  output.to[ulong(row) * output.stride + column] = T(value);
}

// `rows` and `columns` exist from (row, column) on. An element at a time: wider stores changed nothing (section 4).
template <typename Epilogue>
METAL_FUNC void store(thread Matrix<float> &block, thread const Epilogue &epilogue, uint row, uint column, uint rows,
                      uint columns, bool whole, uint lane) {
  const uint i = lane_row(lane), j = lane_column(lane);
  if (whole || (i < rows && j < columns)) finish(epilogue, row + i, column + j, block.thread_elements()[0]);
  if (whole || (i < rows && j + 1 < columns)) finish(epilogue, row + i, column + j + 1, block.thread_elements()[1]);
}

template <typename Epilogue>
METAL_FUNC void store(thread Strip<float> &strip, thread const Epilogue &epilogue, uint row, uint column, uint rows,
                      uint columns, bool whole, uint lane) {
  store(strip.m0, epilogue, row, column, rows, columns, whole, lane);
  store(strip.m1, epilogue, row, column + 8, rows, remaining(columns, 8), whole, lane);
  store(strip.m2, epilogue, row, column + 16, rows, remaining(columns, 16), whole, lane);
  store(strip.m3, epilogue, row, column + 24, rows, remaining(columns, 24), whole, lane);
}

template <typename Epilogue>
METAL_FUNC void store(thread Tile<float> &tile, thread const Epilogue &epilogue, uint row, uint column, uint rows,
                      uint columns, uint lane) {
  const bool whole = rows >= TILE && columns >= TILE;
  store(tile.r0, epilogue, row, column, rows, columns, whole, lane);
  store(tile.r1, epilogue, row + 8, column, remaining(rows, 8), columns, whole, lane);
  store(tile.r2, epilogue, row + 16, column, remaining(rows, 16), columns, whole, lane);
  store(tile.r3, epilogue, row + 24, column, remaining(rows, 24), columns, whole, lane);
}
