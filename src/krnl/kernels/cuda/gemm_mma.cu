// Matrix products of 16-bit elements on the tensor cores that every card from sm_80 on has. All rows of the operands
// begin at multiples of 16 bytes.
//
// A block makes a tile of the result. Tiles of both operands go through a ring in shared memory, fetched some steps
// ahead; they lie there as in memory, and 8×8 matrices are transposed, where they must be, as warps load them.
#include "epilogue.h"
#include "gemm.h"
#include "mma.h"

constexpr int kPiece = 8;  // elements of 16 bytes

// Where a piece lies in a tile of rows of kWidth elements. Rows shift their pieces against one another, so that those
// which are loaded together, eight rows' at the same place, are in different banks: a line of 128 bytes has eight.
template <int kWidth>
__device__ inline int place(int row, int piece) {
  constexpr int kPieces = kWidth / kPiece, kRowsOfLine = kPieces < 8 ? 8 / kPieces : 1;
  return row * kWidth + (piece ^ row / kRowsOfLine % min_of(kPieces, 8)) * kPiece;
}

// The pieces of an operand that a thread fetches in the next step: one above the other in memory.
template <typename T>
struct Pieces {
  const T *first;
  int apart;              // elements from a piece to the next
  int rows, columns;      // that exist, from the first piece on
  int most = 0x7FFFFFFF;  // columns of a row; as long as more are left, it has not begun
};

// An operand's share of a step: kSize rows of the result, or columns, by kStep of K.
template <bool kAlongK, int kSize, int kThreads>
struct Operand {
  static constexpr int kWidth = kAlongK ? kStep : kSize, kElements = kSize * kStep;
  // Threads stand side by side along a row of the tile, and in so many rows.
  static constexpr int kAcross = kWidth / kPiece, kDown = kThreads / kAcross, kCount = kElements / kPiece / kThreads;

  __device__ static int row() { return int(threadIdx.x) / kAcross; }
  __device__ static int piece() { return int(threadIdx.x) % kAcross; }

  // This thread's, from row or column `first` of `size` and from value `k` of `depth` on. Rows in memory are `stride`
  // elements apart.
  template <typename T>
  __device__ static Pieces<T> pieces_of(const T *matrix, int stride, int first, int size, int k, int depth) {
    const int y = (kAlongK ? first : k) + row(), x = (kAlongK ? k : first) + piece() * kPiece;
    const int rows = kAlongK ? size : depth, columns = kAlongK ? depth : size;
    return {matrix + uint64(y) * stride + x, kDown * stride, rows - y, columns - x};
  }

  // Starts to fetch a tile and goes on to the next step. Pieces that do not exist are zeros; `anywhere` is not read.
  template <typename T>
  __device__ static void fetch(T *tile, Pieces<T> &from, const T *anywhere) {
#pragma unroll
    for (int i = 0; i < kCount; i++) {
      const bool there = i * kDown < from.rows && 0 < from.columns && from.columns <= from.most;
      T *const to = tile + place<kWidth>(row() + i * kDown, piece());
      copy_16_async(to, there ? from.first + uint64(i) * from.apart : anywhere, there);
    }
    from.first += kAlongK ? kStep : uint64(kCount) * from.apart;
    (kAlongK ? from.columns : from.rows) -= kStep;
  }

  // Four 8×8 matrices of [size, k] from `first` and `k` on. The second one is that of eight more in size if kSizeFirst,
  // else in k; the third that of the other; the fourth of both.
  template <bool kSizeFirst, typename T>
  __device__ static void load(uint32 (&matrices)[4], const T *tile, int first, int k) {
    const int lane = threadIdx.x % kWarp, low = lane / 8 % 2 * 8, high = lane / 16 * 8;
    first += kSizeFirst ? low : high;
    k += kSizeFirst ? high : low;
    if constexpr (kAlongK) load_matrices(matrices, tile + place<kWidth>(first + lane % 8, k / kPiece));
    else load_matrices_transposed(matrices, tile + place<kWidth>(k + lane % 8, first / kPiece));
  }
};

// A block's product of tiles: kTileM × kTileN by kWarpsM × kWarpsN warps, with kStages steps in the ring.
template <typename T, bool kAlongA, bool kAlongB, int kTileM, int kTileN, int kWarpsM, int kWarpsN, int kStages>
struct Block {
  static constexpr int kThreads = kWarpsM * kWarpsN * kWarp;
  using A = Operand<kAlongA, kTileM, kThreads>;
  using B = Operand<kAlongB, kTileN, kThreads>;
  static constexpr int kStage = A::kElements + B::kElements;
  static constexpr int kWarpRows = kTileM / kWarpsM, kWarpColumns = kTileN / kWarpsN;
  static constexpr int kRows = kWarpRows / 16, kColumns = kWarpColumns / 8;  // of matrices of sums

  float sums[kRows][kColumns][4];

  __device__ static int first_row() { return int(threadIdx.x) / kWarp / kWarpsN * kWarpRows; }
  __device__ static int first_column() { return int(threadIdx.x) / kWarp % kWarpsN * kWarpColumns; }

  // `fetch(a, b)` starts to fetch the tiles of the next step.
  template <typename Fetch>
  __device__ void multiply_all(T *ring, int steps, Fetch fetch) {
#pragma unroll
    for (int i = 0; i < kRows; i++)
#pragma unroll
      for (int j = 0; j < kColumns; j++)
#pragma unroll
        for (int l = 0; l < 4; l++) sums[i][j][l] = 0.0f;

    // A group of copies for every step, empty ones behind the last, so that they can be counted.
    const auto fetch_step = [&](int step) {
      T *const stage = ring + step % kStages * kStage;
      if (step < steps) fetch(stage, stage + A::kElements);
      end_copies();
    };
    for (int step = 0; step < kStages - 1; step++) fetch_step(step);
    for (int step = 0; step < steps; step++) {
      wait_copies<kStages - 2>();
      __syncthreads();  // this step's tiles are there, and the last step's stage is free
      fetch_step(step + kStages - 1);
      const T *const stage = ring + step % kStages * kStage;
      multiply_step(stage, stage + A::kElements);
    }
  }

  __device__ void multiply_step(const T *a_tile, const T *b_tile) {
#pragma unroll
    for (int k = 0; k < kStep; k += 16) {
      uint32 a[kRows][4], b[kColumns / 2][4];
#pragma unroll
      for (int i = 0; i < kRows; i++) A::template load<true>(a[i], a_tile, first_row() + 16 * i, k);
#pragma unroll
      for (int j = 0; j < kColumns / 2; j++) B::template load<false>(b[j], b_tile, first_column() + 16 * j, k);
#pragma unroll
      for (int i = 0; i < kRows; i++)
#pragma unroll
        for (int j = 0; j < kColumns; j++)
          multiply<T>(sums[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }

  // Calls `finish(row, column, i, j, half)` for pairs of adjacent sums, elements 2 half and 2 half + 1 of sums[i][j].
  template <typename Finish>
  __device__ void for_each_pair(Finish finish) const {
    const int lane = threadIdx.x % kWarp, row = first_row() + lane / 4, column = first_column() + lane % 4 * 2;
#pragma unroll
    for (int i = 0; i < kRows; i++)
#pragma unroll
      for (int j = 0; j < kColumns; j++)
#pragma unroll
        for (int half = 0; half < 2; half++) finish(row + 16 * i + 8 * half, column + 8 * j, i, j, half);
  }
};

// The steps of a product in their order: those of the pairs, one pair after the other.
template <typename T, int kLayout, typename A, typename B>
struct Walk {
  static constexpr int kLast = kLayout == kTN ? 0 : kPairs - 1;  // sums over tokens have one pair

  const T *a0, *b0, *a1, *b1, *a2, *b2, *a3, *b3;
  const Shape &shape;
  Place tile;
  int live;

  Pieces<T> a, b;  // of the next step
  int pair, left;  // values of K, of the pair

  // From `step` on, counted from the first of all.
  __device__ void begin(int step) {
    for (pair = 0; pair < kLast; pair++) {
      const int steps = pieces(live_depth<kLayout>(shape.pair[pair], live), kStep);
      if (step < steps) break;
      step -= steps;
    }
    enter(step * kStep);
  }

  __device__ void enter(int k) {
    const Pair &at = shape.pair[pair];
    const int depth = live_depth<kLayout>(at, live), rows = live_rows<kLayout>(shape.rows, live);
    const T *const a_start = pair == 0 ? a0 : pair == 1 ? a1 : pair == 2 ? a2 : a3;
    const T *const b_start = pair == 0 ? b0 : pair == 1 ? b1 : pair == 2 ? b2 : b3;
    a = A::pieces_of(a_start, at.a_stride, tile.row, rows, k, depth);
    b = B::pieces_of(b_start, at.b_stride, tile.column, shape.columns, k, depth);
    left = depth - k;
  }

  __device__ void fetch(T *a_tile, T *b_tile) {
    A::fetch(a_tile, a, a0);
    B::fetch(b_tile, b, b0);
    left -= kStep;
    while (left <= 0 && pair < kLast) {
      pair++;
      enter(0);
    }
  }
};

// grid.x are the tiles of the result. Where they are too few for the GPU, grid.z cuts the K loop into chunks, whose
// sums are left for gemm_reduce. kPaired: pairs of columns can be read and written together.
template <typename T, typename O, int kLayout, int kTileM, int kTileN, int kWarpsM, int kWarpsN, int kStages,
          bool kPaired, bool kSwigluBackward>
__global__ void __launch_bounds__(kWarpsM * kWarpsN * kWarp, 2)
    gemm_mma(const T *a0, const T *b0, const T *a1, const T *b1, const T *a2, const T *b2, const T *adapter_a,
             const T *adapter_b, O *y, const float *scale, const float *bias, const T *residual, const T *gate,
             const T *up, T *dgate, T *dup, const int32 *live, const __grid_constant__ Shape shape, int32 beside) {
  using Block = Block<T, kLayout != kTN, kLayout == kNT, kTileM, kTileN, kWarpsM, kWarpsN, kStages>;
  extern __shared__ __align__(128) uint8 ring[];
  const PreviousLaunch previous(beside);
  const Place tile = locate<kTileM, kTileN>(blockIdx.x, shape.rows, shape.columns);
  const int rows = live_rows<kLayout>(shape.rows, *live);
  if (tile.row >= rows) return;
  const Steps steps = chunk_steps<kLayout>(shape, *live);

  using Walk = Walk<T, kLayout, typename Block::A, typename Block::B>;
  Walk walk{a0, b0, a1, b1, a2, b2, adapter_a, adapter_b, shape, tile, *live};
  walk.begin(steps.first);
  Block block;
  block.multiply_all(reinterpret_cast<T *>(ring), steps.count, [&](T *a, T *b) { walk.fetch(a, b); });

  if (shape.chunks > 1) y += uint64(blockIdx.z) * shape.rows * shape.columns;
  const Epilogue<T, O> epilogue{y, scale, bias, residual, gate, up, dgate, dup, shape.stride, shape.accumulates != 0};
  block.for_each_pair([&](int row, int column, int i, int j, int half) {
    row += tile.row;
    column += tile.column;
    if (row >= rows || column >= shape.columns) return;
    float x[2] = {block.sums[i][j][2 * half], block.sums[i][j][2 * half + 1]};
    if constexpr (kPaired) {
      finish<kSwigluBackward>(epilogue, row, column, x);
    } else {
      float one[1] = {x[0]};
      finish<kSwigluBackward>(epilogue, row, column, one);
      one[0] = x[1];
      if (column + 1 < shape.columns) finish<kSwigluBackward>(epilogue, row, column + 1, one);
    }
  });
}

// In a tile eight columns of gate and the same of up take turns, so that a thread has both values of an element. These
// are the pieces of one of the two, which is all that a thread fetches. Along K its rows begin at `first`; the adapters
// thus stand in blocks on a diagonal.
template <typename B, typename T>
__device__ inline Pieces<T> pieces_of_pair(const T *matrix, int column, int columns, int first, int depth) {
  static_assert(B::kDown % 16 == 0);
  const int own = column + B::row() / 16 * 8 + B::row() % 8, k = B::piece() * kPiece - first;
  return {matrix + uint64(own) * depth + k, B::kDown / 2 * depth, 2 * (columns - own), depth - k, depth};
}

// gate and up in one product, and SwiGLU. kTileN counts both.
template <typename T, int kTileM, int kTileN, int kWarpsM, int kWarpsN, int kStages, bool kPaired>
__global__ void __launch_bounds__(kWarpsM * kWarpsN * kWarp, 2)
    gemm_mma_swiglu(const T *x, const T *w_gate, const T *w_up, const T *u, const T *b_gate, const T *b_up, T *gate,
                    T *up, T *act, const int32 *live, const __grid_constant__ SwigluShape shape, int32 beside) {
  using Block = Block<T, true, true, kTileM, kTileN, kWarpsM, kWarpsN, kStages>;
  extern __shared__ __align__(128) uint8 ring[];
  const PreviousLaunch previous(beside);
  const Place tile = locate<kTileM, kTileN / 2>(blockIdx.x, shape.rows, shape.columns);
  const int rows = min_of(shape.rows, *live);
  if (tile.row >= rows) return;

  using A = typename Block::A;
  using B = typename Block::B;
  const int depth = shape.depth, rank = shape.gate_rank + shape.up_rank;
  const bool is_up = B::row() / 8 % 2;
  Pieces<T> a = A::pieces_of(x, depth, tile.row, rows, 0, depth);
  Pieces<T> b = pieces_of_pair<B>(is_up ? w_up : w_gate, tile.column, shape.columns, 0, depth);
  int left = depth;
  Block block;
  const int steps = pieces(depth, kStep) + pieces(rank, kStep);
  block.multiply_all(reinterpret_cast<T *>(ring), steps, [&](T *a_tile, T *b_tile) {
    A::fetch(a_tile, a, x);
    B::fetch(b_tile, b, w_gate);
    left -= kStep;
    if (left <= 0) {
      left = rank;
      a = A::pieces_of(u, rank, tile.row, rows, 0, rank);
      b = is_up ? pieces_of_pair<B>(b_up, tile.column, shape.columns, shape.gate_rank, shape.up_rank)
                : pieces_of_pair<B>(b_gate, tile.column, shape.columns, 0, shape.gate_rank);
    }
  });

  const Swiglu<T> swiglu{gate, up, act, shape.columns};
  block.for_each_pair([&](int row, int column, int i, int j, int half) {
    if (j % 2) return;
    row += tile.row;
    column = tile.column + column / 16 * 8 + column % 8;
    if (row >= rows || column >= shape.columns) return;
    const float gates[2] = {block.sums[i][j][2 * half], block.sums[i][j][2 * half + 1]};
    const float ups[2] = {block.sums[i][j + 1][2 * half], block.sums[i][j + 1][2 * half + 1]};
    if constexpr (kPaired) {
      finish(swiglu, row, column, gates, ups);
    } else {
      const float gate0[1] = {gates[0]}, up0[1] = {ups[0]}, gate1[1] = {gates[1]}, up1[1] = {ups[1]};
      finish(swiglu, row, column, gate0, up0);
      if (column + 1 < shape.columns) finish(swiglu, row, column + 1, gate1, up1);
    }
  });
}
