// What gemm_simt.cu and gemm_mma.cu have in common: sums of up to three products and an adapter's. gemm_chunks.py says
// how they are launched.
#pragma once
#include "common.h"
#include "layout.h"

constexpr int kStep = 32;      // values of K that are staged together
constexpr int kPairs = 4;      // the last is the adapter's

// Strides are the elements from a row in memory to the next. Pairs that a product does not have are of depth 0.
struct Pair {
  int32 depth, a_stride, b_stride;
};

struct Shape {
  int32 rows, columns;
  int32 stride;       // of the result, and of what is read or written beside it
  int32 chunks;       // into which the K loop is cut, along grid.z
  int32 accumulates;  // the sum is added to the result
  Pair pair[kPairs];
};

// Rows of the result that exist, and values of K of a pair: tokens from `live` on are neither read nor written.
template <int kLayout>
__device__ inline int live_rows(int rows, int live) {
  return kLayout == kTN ? rows : min_of(rows, live);
}
template <int kLayout>
__device__ inline int live_depth(const Pair &pair, int live) {
  return kLayout == kTN ? min_of(pair.depth, live) : pair.depth;
}

// The first row and column of a tile. Where a group of rows of tiles ends, the next one begins.
struct Place {
  int row, column;
};
template <int kRows, int kColumns>
__device__ inline Place locate(int index, int rows, int columns) {
  const int across = pieces(columns, kColumns), group = kTileGroup * across, first = index / group * kTileGroup;
  const int height = min_of(pieces(rows, kRows) - first, kTileGroup), within = index % group;
  return {(first + within % height) * kRows, within / height * kColumns};
}

// The steps along K that are this block's: chunks are of equally many steps, the last one of what is left.
struct Steps {
  int first, count;
};
template <int kLayout>
__device__ inline Steps chunk_steps(const Shape &shape, int live) {
  int all = 0;
#pragma unroll
  for (int i = 0; i < kPairs; i++) all += pieces(live_depth<kLayout>(shape.pair[i], live), kStep);
  const int each = pieces(all, shape.chunks), first = int(blockIdx.z) * each;
  return {first, max_of(0, min_of(each, all - first))};
}

// gate and up in one product, and SwiGLU. The adapters stand in blocks on a diagonal: gate's k come first, up's follow.
struct SwigluShape {
  int32 rows, columns, depth;
  int32 gate_rank, up_rank;
};
