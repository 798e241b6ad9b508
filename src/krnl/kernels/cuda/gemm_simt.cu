// Matrix products of any types, shapes and strides in ordinary arithmetic: what the other kernels do not take. A block
// makes a tile of 64 × 64; operands are converted to floats as they are staged, and a thread sums 4 × 4 elements.
#include "epilogue.h"
#include "gemm.h"

constexpr int kTile = 64, kThreads = 256, kSide = 4;
// Rows of a staged tile begin in banks that are four apart: threads that stage eight k of four rows write to 32 banks.
constexpr int kWidth = kTile + 4;

// [k, row or column of the tile].
using Stage = float[kStep][kWidth];

struct Sums {
  float of[kSide][kSide];
};

// Fills a stage from `element(i, k)`. Neighbouring threads take neighbours in memory: along K, or from row to row.
template <bool kAlongK, typename Element>
__device__ inline void fill(Stage &stage, Element element) {
  const int thread = threadIdx.x, lane = thread % kWarp, warp = thread / kWarp;
#pragma unroll
  for (int part = 0; part < kTile * kStep / kThreads; part++) {
    const int i = kAlongK ? warp * 8 + part / 4 * 4 + lane / 8 : thread % kTile;
    const int k = kAlongK ? part % 4 * 8 + lane % 8 : part * (kThreads / kTile) + thread / kTile;
    stage[k][i] = element(i, k);
  }
}

__device__ inline void multiply(Sums &sums, const Stage &a, const Stage &b) {
  const int row = threadIdx.x / 16 * kSide, column = threadIdx.x % 16 * kSide;
#pragma unroll 8
  for (int k = 0; k < kStep; k++) {
    const float4 a4 = *reinterpret_cast<const float4 *>(&a[k][row]);
    const float4 b4 = *reinterpret_cast<const float4 *>(&b[k][column]);
    const float as[kSide] = {a4.x, a4.y, a4.z, a4.w}, bs[kSide] = {b4.x, b4.y, b4.z, b4.w};
#pragma unroll
    for (int i = 0; i < kSide; i++)
#pragma unroll
      for (int j = 0; j < kSide; j++) sums.of[i][j] += as[i] * bs[j];
  }
}

// sums += a b over those of this pair's steps that lie from `first` on and before `end`. a and b begin at the tile's
// first row and column, of which so many exist.
template <int kLayout, typename A, typename B>
__device__ inline void multiply_pair(Sums &sums, Stage &a_stage, Stage &b_stage, const A *a, const B *b,
                                     const Pair &pair, int depth, int first, int end, int rows, int columns) {
  constexpr bool kAlongA = kLayout != kTN, kAlongB = kLayout == kNT;
  for (int step = max_of(first, 0); step < min_of(end, pieces(depth, kStep)); step++) {
    const int start = step * kStep;
    fill<kAlongA>(a_stage, [&](int i, int k) {
      k += start;
      const uint64 at = kAlongA ? uint64(i) * pair.a_stride + k : uint64(k) * pair.a_stride + i;
      return i < rows && k < depth ? to_float(a[at]) : 0.0f;
    });
    fill<kAlongB>(b_stage, [&](int j, int k) {
      k += start;
      const uint64 at = kAlongB ? uint64(j) * pair.b_stride + k : uint64(k) * pair.b_stride + j;
      return j < columns && k < depth ? to_float(b[at]) : 0.0f;
    });
    __syncthreads();
    multiply(sums, a_stage, b_stage);
    __syncthreads();
  }
}

// grid.x are the tiles of the result. Where they are too few for the GPU, grid.z cuts the K loop into chunks, whose
// sums are left for gemm_reduce.
template <typename T, typename W, typename O, int kLayout, bool kSwigluBackward>
__global__ void __launch_bounds__(kThreads, 2)
    gemm_simt(const T *a0, const W *b0, const T *a1, const W *b1, const T *a2, const W *b2, const T *adapter_a,
              const T *adapter_b, O *y, const float *scale, const float *bias, const T *residual, const T *gate,
              const T *up, T *dgate, T *dup, const int32 *live, const __grid_constant__ Shape shape, int32 beside) {
  __shared__ __align__(16) Stage a_stage, b_stage;
  const PreviousLaunch previous(beside);
  const Place tile = locate<kTile, kTile>(blockIdx.x, shape.rows, shape.columns);
  const int rows = live_rows<kLayout>(shape.rows, *live) - tile.row, columns = shape.columns - tile.column;
  if (rows <= 0) return;
  const Steps steps = chunk_steps<kLayout>(shape, *live);

  Sums sums = {};
  int first = steps.first;
  const auto multiply_at = [&](int i, const T *a, const auto *b) {
    const Pair &pair = shape.pair[i];
    const int depth = live_depth<kLayout>(pair, *live);
    a += uint64(tile.row) * (kLayout == kTN ? 1 : pair.a_stride);
    b += uint64(tile.column) * (kLayout == kNT ? pair.b_stride : 1);
    multiply_pair<kLayout>(sums, a_stage, b_stage, a, b, pair, depth, first, first + steps.count, rows, columns);
    first -= pieces(depth, kStep);
  };
#pragma unroll 1
  for (int i = 0; i < kPairs - 1; i++) multiply_at(i, i == 0 ? a0 : i == 1 ? a1 : a2, i == 0 ? b0 : i == 1 ? b1 : b2);
  multiply_at(kPairs - 1, adapter_a, adapter_b);

  if (shape.chunks > 1) y += uint64(blockIdx.z) * shape.rows * shape.columns;
  const Epilogue<T, O> epilogue{y, scale, bias, residual, gate, up, dgate, dup, shape.stride, shape.accumulates != 0};
  const int row = threadIdx.x / 16 * kSide, column = threadIdx.x % 16 * kSide;
#pragma unroll
  for (int i = 0; i < kSide; i++)
#pragma unroll
    for (int j = 0; j < kSide; j++) {
      float x[1] = {sums.of[i][j]};
      if (row + i < rows && column + j < columns)
        finish<kSwigluBackward>(epilogue, tile.row + row + i, tile.column + column + j, x);
    }
}

// One thread for each element of the result: adds up its chunks in their order.
template <typename T, typename O, int kLayout, bool kSwigluBackward>
__global__ void __launch_bounds__(kThreads)
    gemm_reduce(const float *partials, O *y, const float *scale, const float *bias, const T *residual, const T *gate,
                const T *up, T *dgate, T *dup, const int32 *live, const __grid_constant__ Shape shape, int32 beside) {
  const PreviousLaunch previous(beside);
  const int size = shape.rows * shape.columns, index = int(blockIdx.x) * kThreads + int(threadIdx.x);
  const int row = index / shape.columns, column = index % shape.columns;
  if (row >= live_rows<kLayout>(shape.rows, *live)) return;
  float sum[1] = {0.0f};
  for (int chunk = 0; chunk < shape.chunks; chunk++) sum[0] += partials[uint64(chunk) * size + index];
  const Epilogue<T, O> epilogue{y, scale, bias, residual, gate, up, dgate, dup, shape.stride, shape.accumulates != 0};
  finish<kSwigluBackward>(epilogue, row, column, sum);
}

// gate and up in one product: of the tile's columns, even ones are gate's and odd ones the same columns of up.
template <typename T, typename W>
__global__ void __launch_bounds__(kThreads, 2)
    gemm_simt_swiglu(const T *x, const W *w_gate, const W *w_up, const T *u, const T *b_gate, const T *b_up, T *gate,
                     T *up, T *act, const int32 *live, const __grid_constant__ SwigluShape shape, int32 beside) {
  __shared__ __align__(16) Stage a_stage, b_stage;
  const PreviousLaunch previous(beside);
  const Place tile = locate<kTile, kTile / 2>(blockIdx.x, shape.rows, shape.columns);
  const int rows = min_of(shape.rows, *live) - tile.row, columns = shape.columns - tile.column;
  if (rows <= 0) return;

  Sums sums = {};
  for (int start = 0; start < shape.depth; start += kStep) {
    fill<true>(a_stage, [&](int i, int k) {
      k += start;
      return i < rows && k < shape.depth ? to_float(x[uint64(tile.row + i) * shape.depth + k]) : 0.0f;
    });
    fill<true>(b_stage, [&](int j, int k) {
      k += start;
      const W *const w = j % 2 ? w_up : w_gate;
      return j / 2 < columns && k < shape.depth ? to_float(w[uint64(tile.column + j / 2) * shape.depth + k]) : 0.0f;
    });
    __syncthreads();
    multiply(sums, a_stage, b_stage);
    __syncthreads();
  }
  const int rank = shape.gate_rank + shape.up_rank;
  for (int start = 0; start < rank; start += kStep) {
    fill<true>(a_stage, [&](int i, int k) {
      k += start;
      return i < rows && k < rank ? to_float(u[uint64(tile.row + i) * rank + k]) : 0.0f;
    });
    fill<true>(b_stage, [&](int j, int k) {
      const bool is_up = j % 2;
      const T *const b = is_up ? b_up : b_gate;
      const int own = is_up ? shape.up_rank : shape.gate_rank;
      k += start - (is_up ? shape.gate_rank : 0);
      return j / 2 < columns && 0 <= k && k < own ? to_float(b[uint64(tile.column + j / 2) * own + k]) : 0.0f;
    });
    __syncthreads();
    multiply(sums, a_stage, b_stage);
    __syncthreads();
  }

  const Swiglu<T> swiglu{gate, up, act, shape.columns};
  const int row = threadIdx.x / 16 * kSide, column = threadIdx.x % 16 * kSide / 2;
#pragma unroll
  for (int i = 0; i < kSide; i++)
#pragma unroll
    for (int j = 0; j < kSide / 2; j++) {
      const float gates[1] = {sums.of[i][2 * j]}, ups[1] = {sums.of[i][2 * j + 1]};
      if (row + i < rows && column + j < columns)
        finish(swiglu, tile.row + row + i, tile.column + column + j, gates, ups);
    }
}
