// Attention of 16-bit elements on tensor cores; the scores are never in memory (Dao 2023, FlashAttention-2).
//
//   S = Q Kᵀ          P = softmax(scale S)      O = P V
//   dP = dO Vᵀ        dS = P ∘ (dP - rowsum(dO ∘ O)) scale
//   dQ = dS K         dK = dSᵀ Q                dV = Pᵀ dO
//
// A block holds 64 rows of one head in registers, a warp 16 of them: queries in the forward pass and for dQ, keys and
// values for dK and dV. The other side comes in tiles through shared memory, the next one while the last is worked on.
// P and dS go from the result of one product into the operand of the next without leaving the registers.
//
// Rows of [n, h, d] lie h·d elements apart. Heads are filled up with zeros to kWidth columns.
#include "attention.h"
#include "mma.h"

constexpr int kWarps = 4, kThreads = kWarps * kWarp, kWarpRows = 16, kRows = kWarps * kWarpRows;

// Rows of a tile that comes through shared memory.
template <int kWidth>
constexpr int kTile = kWidth > 64 ? 32 : 64;
// Elements from a row to the next in shared memory: eight rows lie in different banks.
template <int kWidth>
constexpr int kStride = kWidth + 8;
// Two tiles, or 64 rows on their way to registers or from there.
template <int kWidth>
constexpr int kPairOfTiles = 2 * kTile<kWidth> * kStride<kWidth>;

// Blocks on a multiprocessor, as many as the registers of the passes allow: forward, and for gradients.
constexpr int kForwardBlocks = 3;
template <int kWidth>
constexpr int kGradientBlocks = kWidth > 64 ? 2 : 3;

template <typename T, int kCount>
__device__ inline void clear(T (&sums)[kCount][4]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) sums[i][j] = 0;
  }
}

// Starts to copy rows first ≤ i < stop of a head to a tile; the rest of the tile becomes zeros.
template <int kWidth, int kTileRows, typename T>
__device__ inline void copy_rows(T *tile, const T *head, int stride, int size, int first, int stop) {
  constexpr int kPieces = kWidth / 8;
#pragma unroll
  for (int i = 0; i < kTileRows * kPieces / kThreads; i++) {
    const int index = threadIdx.x + i * kThreads, row = index / kPieces, column = index % kPieces * 8;
    const bool there = first + row < stop && column < size;
    const T *from = there ? head + uint64(first + row) * stride + column : head;
    copy_16_async(tile + row * kStride<kWidth> + column, from, there);
  }
}

// Operand a of 16 rows.
template <int kWidth, typename T>
__device__ inline void load_rows(uint32 (&a)[kWidth / 16][4], const T *rows) {
  const int lane = threadIdx.x % kWarp;
  const T *from = rows + lane % 16 * kStride<kWidth> + lane / 16 * 8;
#pragma unroll
  for (int i = 0; i < kWidth / 16; i++) load_matrices(a[i], from + i * 16);
}

// sums = a rowsᵀ, one column for each of kColumns rows.
template <int kWidth, int kColumns, typename T>
__device__ inline void multiply_nt(float (&sums)[kColumns / 8][4], const uint32 (&a)[kWidth / 16][4], const T *rows) {
  const int lane = threadIdx.x % kWarp;
  const T *from = rows + (lane % 8 + lane / 16 * 8) * kStride<kWidth> + lane / 8 % 2 * 8;
  clear(sums);
#pragma unroll
  for (int i = 0; i < kWidth / 16; i++) {
#pragma unroll
    for (int j = 0; j < kColumns / 16; j++) {
      uint32 b[4];
      load_matrices(b, from + j * 16 * kStride<kWidth> + i * 16);
      multiply<T>(sums[2 * j], a[i], b[0], b[1]);
      multiply<T>(sums[2 * j + 1], a[i], b[2], b[3]);
    }
  }
}

// sums += a rows, with a column of a for each of kDepth rows.
template <int kWidth, int kDepth, typename T>
__device__ inline void multiply_nn(float (&sums)[kWidth / 8][4], const uint32 (&a)[kDepth / 16][4], const T *rows) {
  const int lane = threadIdx.x % kWarp;
  const T *from = rows + lane % 16 * kStride<kWidth> + lane / 16 * 8;
#pragma unroll
  for (int i = 0; i < kDepth / 16; i++) {
#pragma unroll
    for (int j = 0; j < kWidth / 16; j++) {
      uint32 b[4];
      load_matrices_transposed(b, from + i * 16 * kStride<kWidth> + j * 16);
      multiply<T>(sums[2 * j], a[i], b[0], b[1]);
      multiply<T>(sums[2 * j + 1], a[i], b[2], b[3]);
    }
  }
}

// Results of a product as operand a of the next.
template <typename T, int kColumns>
__device__ inline void as_operand(uint32 (&a)[kColumns / 16][4], const float (&sums)[kColumns / 8][4]) {
#pragma unroll
  for (int i = 0; i < kColumns / 16; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) a[i][j] = pack<T>(sums[2 * i + j / 2][j % 2 * 2], sums[2 * i + j / 2][j % 2 * 2 + 1]);
  }
}

// A warp's rows of those that a block has in shared memory.
template <int kWidth, typename T>
__device__ inline T *rows_of_warp(T *rows) {
  return rows + threadIdx.x / kWarp * kWarpRows * kStride<kWidth>;
}

// Writes a warp's 16 rows, as far as they are below `stop`, by way of shared memory, which the block must be done with.
// `factor` is for the upper and for the lower eight rows.
template <int kWidth, typename T>
__device__ inline void store_rows(T *head, int stride, int size, int first, int stop,
                                  const float (&sums)[kWidth / 8][4], const float (&factor)[2], T *shared) {
  constexpr int kPieces = kWidth / 8;
  T *rows = rows_of_warp<kWidth>(shared);
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < kWidth / 8; i++) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const uint32 two = pack<T>(sums[i][2 * half] * factor[half], sums[i][2 * half + 1] * factor[half]);
      *reinterpret_cast<uint32 *>(rows + (lane / 4 + half * 8) * kStride<kWidth> + i * 8 + lane % 4 * 2) = two;
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < kWarpRows * kPieces / kWarp; i++) {
    const int index = lane + i * kWarp, row = index / kPieces, column = index % kPieces * 8;
    if (first + row < stop && column < size)
      *reinterpret_cast<uint4 *>(head + uint64(first + row) * stride + column) =
          *reinterpret_cast<const uint4 *>(rows + row * kStride<kWidth> + column);
  }
}

// o and lse of a block of queries. The last ones, which see the most keys in training, come first. Every live query
// sees a key, and all keys from the first to the last that a block sees hold finite numbers.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, kForwardBlocks)
    attention_forward(const T *q, const T *k, const T *v, const int32 *start, const int32 *stop, const int32 *live,
                      T *o, float *lse, Shape shape, int32 beside) {
  constexpr int kKeys = kTile<kWidth>, kTileSize = kKeys * kStride<kWidth>;
  // Below any score. It is finite, so that its distance to a hidden score, -infinity, is defined.
  constexpr float kNoScore = -1e30f;
  __shared__ alignas(16) T keys[kPairOfTiles<kWidth>], values[kPairOfTiles<kWidth>];
  // In shared memory as there are no registers left: of each query, and of each warp's queries.
  __shared__ int starts[kRows], stops[kRows];
  __shared__ alignas(16) Seen seen_by_warps[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int head = blockIdx.x % shape.heads, key_head = head / (shape.heads / shape.key_heads);
  const int block_first = (shape.blocks - 1 - int(blockIdx.x) / shape.heads) * kRows;
  const int first = block_first + warp * kWarpRows;
  const int stride = shape.heads * shape.size, key_stride = shape.key_heads * shape.size;
  k += key_head * shape.size;
  v += key_head * shape.size;
  const PreviousLaunch previous(beside);
  const int queries = *live;
  if (block_first >= queries) return;

  copy_rows<kWidth, kRows>(keys, q + head * shape.size, stride, shape.size, block_first, queries);
  end_copies();
  const Seen seen = seen_by(start, stop, block_first, kRows, queries);
  const Seen seen_by_warp = seen_by(start, stop, first, kWarpRows, queries);
  if (lane == 0) seen_by_warps[warp] = seen_by_warp;
  if (threadIdx.x < kRows) {
    const int query = block_first + threadIdx.x;
    starts[threadIdx.x] = query < queries ? start[query] : 0;
    stops[threadIdx.x] = query < queries ? stop[query] : 0;
  }
  wait_copies<0>();
  __syncthreads();
  uint32 query_rows[kWidth / 16][4];
  load_rows<kWidth>(query_rows, rows_of_warp<kWidth>(keys));
  __syncthreads();

  const auto copy_tile = [&](int key, int offset) {
    copy_rows<kWidth, kKeys>(keys + offset, k, key_stride, shape.size, key, seen.stop);
    copy_rows<kWidth, kKeys>(values + offset, v, key_stride, shape.size, key, seen.stop);
    end_copies();
  };
  const float scale = shape.scale * kLog2E;
  float out[kWidth / 8][4], top[2] = {kNoScore, kNoScore}, total[2] = {0.0f, 0.0f};
  clear(out);
  copy_tile(seen.first, 0);
  for (int key = seen.first, offset = 0; key < seen.stop; key += kKeys, offset = kTileSize - offset) {
    wait_copies<0>();
    __syncthreads();
    if (key + kKeys < seen.stop) copy_tile(key + kKeys, kTileSize - offset);
    if (!seen_by_warps[warp].any(key, kKeys)) continue;

    float scores[kKeys / 8][4];
    multiply_nt<kWidth, kKeys>(scores, query_rows, keys + offset);
    if (!seen_by_warps[warp].all(key, kKeys)) {
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int row = warp * kWarpRows + lane / 4 + half * 8, row_start = starts[row], row_stop = stops[row];
#pragma unroll
        for (int i = 0; i < kKeys / 8; i++) {
#pragma unroll
          for (int j = 0; j < 2; j++) {
            const int column = key + i * 8 + lane % 4 * 2 + j;
            if (column < row_start || column >= row_stop) scores[i][2 * half + j] = -infinity();
          }
        }
      }
    }

    // Scores become exponentials relative to the largest so far. If it grew, earlier sums are scaled down.
    float factor[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float new_top = top[half];
#pragma unroll
      for (int i = 0; i < kKeys / 8; i++) new_top = fmaxf(new_top, fmaxf(scores[i][2 * half], scores[i][2 * half + 1]));
      new_top = max_of_four(new_top);
      factor[half] = power_of_two((top[half] - new_top) * scale);
      top[half] = new_top;
      total[half] *= factor[half];
#pragma unroll
      for (int i = 0; i < kKeys / 8; i++) {
#pragma unroll
        for (int j = 2 * half; j < 2 * half + 2; j++) {
          scores[i][j] = power_of_two(fmaf(scores[i][j], scale, -new_top * scale));
          total[half] += scores[i][j];
        }
      }
    }
    if (__any_sync(~0u, factor[0] != 1.0f || factor[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kWidth / 8; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) out[i][j] *= factor[j / 2];
      }
    }
    uint32 p[kKeys / 16][4];
    as_operand<T, kKeys>(p, scores);
    multiply_nn<kWidth, kKeys>(out, p, values + offset);
  }

  float inverse[2];
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int query = first + lane / 4 + half * 8;
    total[half] = sum_of_four(total[half]);
    inverse[half] = 1.0f / total[half];
    if (lane % 4 == 0 && query < queries)
      lse[uint64(query) * shape.heads + head] = fmaf(top[half], shape.scale, logf(total[half]));
  }
  __syncthreads();
  store_rows<kWidth>(o + head * shape.size, stride, shape.size, first, queries, out, inverse, keys);
}

// dq of a block of queries, and delta = rowsum(dO ∘ O), which equals rowsum(P ∘ dP).
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, kGradientBlocks<kWidth>)
    attention_query_gradients(const T *d_out, const T *q, const T *k, const T *v, const T *o, const float *lse,
                              const int32 *start, const int32 *live, T *dq, float *delta, Shape shape, int32 beside) {
  constexpr int kKeys = kTile<kWidth>, kTileSize = kKeys * kStride<kWidth>, kPart = 32;
  __shared__ alignas(16) T keys[kPairOfTiles<kWidth>], values[kPairOfTiles<kWidth>];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int head = blockIdx.x % shape.heads, key_head = head / (shape.heads / shape.key_heads);
  const int block_first = (shape.blocks - 1 - int(blockIdx.x) / shape.heads) * kRows;
  const int first = block_first + warp * kWarpRows;
  const int stride = shape.heads * shape.size, key_stride = shape.key_heads * shape.size;
  d_out += head * shape.size;
  q += head * shape.size;
  k += key_head * shape.size;
  v += key_head * shape.size;
  o += head * shape.size;
  dq += head * shape.size;
  const PreviousLaunch previous(beside);
  const int queries = *live;
  if (block_first >= queries) return;

  copy_rows<kWidth, kRows>(keys, q, stride, shape.size, block_first, queries);
  copy_rows<kWidth, kRows>(values, d_out, stride, shape.size, block_first, queries);
  end_copies();
  // o as the operand that it would be.
  uint32 out_rows[kWidth / 16][4];
#pragma unroll
  for (int i = 0; i < kWidth / 16; i++) {
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int query = first + lane / 4 + j % 2 * 8, column = i * 16 + j / 2 * 8 + lane % 4 * 2;
      const bool there = query < queries && column < shape.size;
      out_rows[i][j] = there ? *reinterpret_cast<const uint32 *>(o + uint64(query) * stride + column) : 0;
    }
  }
  const Seen seen = seen_by(start, nullptr, block_first, kRows, queries);
  const Seen mine = seen_by(start, nullptr, first, kWarpRows, queries);
  wait_copies<0>();
  __syncthreads();
  uint32 query_rows[kWidth / 16][4], d_out_rows[kWidth / 16][4];
  load_rows<kWidth>(query_rows, rows_of_warp<kWidth>(keys));
  load_rows<kWidth>(d_out_rows, rows_of_warp<kWidth>(values));
  __syncthreads();

  int row_start[2];
  float row_lse[2], row_delta[2];  // in units of log 2; times the scale
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int query = first + lane / 4 + half * 8;
    const uint64 at = uint64(query) * shape.heads + head;
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWidth / 16; i++) {
#pragma unroll
      for (int j = half; j < 4; j += 2) {
        const float2 a = unpack<T>(d_out_rows[i][j]), b = unpack<T>(out_rows[i][j]);
        sum += a.x * b.x + a.y * b.y;
      }
    }
    sum = sum_of_four(sum);
    row_start[half] = query < queries ? start[query] : 0;
    row_lse[half] = query < queries ? lse[at] * kLog2E : 0.0f;
    row_delta[half] = sum * shape.scale;
    if (lane % 4 == 0 && query < queries) delta[at] = sum;
  }

  const auto copy_tile = [&](int key, int offset) {
    copy_rows<kWidth, kKeys>(keys + offset, k, key_stride, shape.size, key, seen.stop);
    copy_rows<kWidth, kKeys>(values + offset, v, key_stride, shape.size, key, seen.stop);
    end_copies();
  };
  const float scale = shape.scale * kLog2E;
  float sums[kWidth / 8][4];
  clear(sums);
  copy_tile(seen.first, 0);
  for (int key = seen.first, offset = 0; key < seen.stop; key += kKeys, offset = kTileSize - offset) {
    wait_copies<0>();
    __syncthreads();
    if (key + kKeys < seen.stop) copy_tile(key + kKeys, kTileSize - offset);
#pragma unroll
    for (int part = 0; part < kKeys; part += kPart) {
      if (!mine.any(key + part, kPart)) continue;
      const T *part_keys = keys + offset + part * kStride<kWidth>;
      const T *part_values = values + offset + part * kStride<kWidth>;
      float p[kPart / 8][4], dp[kPart / 8][4];
      multiply_nt<kWidth, kPart>(p, query_rows, part_keys);
      multiply_nt<kWidth, kPart>(dp, d_out_rows, part_values);
      const bool all = mine.all(key + part, kPart);
#pragma unroll
      for (int i = 0; i < kPart / 8; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
          const int column = key + part + i * 8 + lane % 4 * 2 + j % 2, query = first + lane / 4 + j / 2 * 8;
          p[i][j] = power_of_two(fmaf(p[i][j], scale, -row_lse[j / 2]));
          if (!all && (column < row_start[j / 2] || column > query)) p[i][j] = 0.0f;
          dp[i][j] = p[i][j] * fmaf(dp[i][j], shape.scale, -row_delta[j / 2]);
        }
      }
      uint32 ds[kPart / 16][4];
      as_operand<T, kPart>(ds, dp);
      multiply_nn<kWidth, kPart>(sums, ds, part_keys);
    }
  }
  __syncthreads();
  const float factor[2] = {1.0f, 1.0f};
  store_rows<kWidth>(dq, stride, shape.size, first, queries, sums, factor, keys);
}

// dk and dv of a block of keys: one sum over the query heads that read them and the queries that see them. S and dP are
// transposed, rows are keys: so P and dS are what dV and dK multiply from the left.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads, kGradientBlocks<kWidth>)
    attention_key_gradients(const T *d_out, const T *q, const T *k, const T *v, const float *lse, const float *delta,
                            const int32 *start, const int32 *live, T *dk, T *dv, Shape shape, int32 beside) {
  constexpr int kQueries = kTile<kWidth>, kTileSize = kQueries * kStride<kWidth>, kPart = 16;
  __shared__ alignas(16) T query_tiles[kPairOfTiles<kWidth>], d_out_tiles[kPairOfTiles<kWidth>];
  __shared__ alignas(8) float lse_tiles[2][kQueries], delta_tiles[2][kQueries];
  __shared__ int start_tiles[2][kQueries];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int key_head = blockIdx.x % shape.key_heads, group = shape.heads / shape.key_heads;
  const int block_first = blockIdx.x / shape.key_heads * kRows;
  const int first = block_first + warp * kWarpRows;
  const int stride = shape.heads * shape.size, key_stride = shape.key_heads * shape.size;
  const PreviousLaunch previous(beside);
  const int queries = *live;
  if (block_first >= queries) return;

  copy_rows<kWidth, kRows>(query_tiles, k + key_head * shape.size, key_stride, shape.size, block_first, queries);
  copy_rows<kWidth, kRows>(d_out_tiles, v + key_head * shape.size, key_stride, shape.size, block_first, queries);
  end_copies();
  const int stop = first_past(start, block_first + kRows - 1, block_first, queries);
  wait_copies<0>();
  __syncthreads();
  uint32 key_rows[kWidth / 16][4], value_rows[kWidth / 16][4];
  load_rows<kWidth>(key_rows, rows_of_warp<kWidth>(query_tiles));
  load_rows<kWidth>(value_rows, rows_of_warp<kWidth>(d_out_tiles));
  __syncthreads();

  const auto copy_tile = [&](int head, int query, int stage) {
    T *query_tile = query_tiles + stage * kTileSize, *d_out_tile = d_out_tiles + stage * kTileSize;
    copy_rows<kWidth, kQueries>(query_tile, q + head * shape.size, stride, shape.size, query, stop);
    copy_rows<kWidth, kQueries>(d_out_tile, d_out + head * shape.size, stride, shape.size, query, stop);
    if (threadIdx.x < kQueries) {
      const int row = query + threadIdx.x;
      const bool there = row < stop;
      const uint64 at = there ? uint64(row) * shape.heads + head : 0;
      copy_4_async(&lse_tiles[stage][threadIdx.x], lse + at, there);
      copy_4_async(&delta_tiles[stage][threadIdx.x], delta + at, there);
      copy_4_async(&start_tiles[stage][threadIdx.x], start + (there ? row : 0), there);
    }
    end_copies();
  };
  const float scale = shape.scale * kLog2E;
  float key_sums[kWidth / 8][4], value_sums[kWidth / 8][4];
  clear(key_sums);
  clear(value_sums);
  int head = key_head * group, query = block_first, stage = 0;
  const int stop_head = head + group;
  copy_tile(head, query, stage);
  while (head < stop_head) {
    int next_head = head, next_query = query + kQueries;
    if (next_query >= stop) next_head++, next_query = block_first;
    wait_copies<0>();
    __syncthreads();
    if (next_head < stop_head) copy_tile(next_head, next_query, stage ^ 1);
    const T *query_tile = query_tiles + stage * kTileSize, *d_out_tile = d_out_tiles + stage * kTileSize;
#pragma unroll 1
    for (int part = 0; part < kQueries; part += kPart) {
      const int last = query + part + kPart - 1;
      if (last < first || query + part >= stop || start_tiles[stage][part] >= first + kWarpRows) continue;
      const bool all = query + part >= first + kWarpRows - 1 && last < stop &&
                       start_tiles[stage][part + kPart - 1] <= first;
      const T *part_queries = query_tile + part * kStride<kWidth>, *part_d_outs = d_out_tile + part * kStride<kWidth>;
      float p[kPart / 8][4], dp[kPart / 8][4];
      multiply_nt<kWidth, kPart>(p, key_rows, part_queries);
      multiply_nt<kWidth, kPart>(dp, value_rows, part_d_outs);
#pragma unroll
      for (int i = 0; i < kPart / 8; i++) {
        const int column = part + i * 8 + lane % 4 * 2;
        const float2 column_lse = *reinterpret_cast<const float2 *>(&lse_tiles[stage][column]);
        const float2 column_delta = *reinterpret_cast<const float2 *>(&delta_tiles[stage][column]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
          p[i][j] = power_of_two(fmaf(p[i][j], scale, -(j % 2 ? column_lse.y : column_lse.x) * kLog2E));
          if (!all) {  // queries from `stop` on are zeros, also in dO, and add nothing
            const int seer = query + column + j % 2, key = first + lane / 4 + j / 2 * 8;
            if (seer < key || start_tiles[stage][column + j % 2] > key) p[i][j] = 0.0f;
          }
          dp[i][j] = p[i][j] * ((dp[i][j] - (j % 2 ? column_delta.y : column_delta.x)) * shape.scale);
        }
      }
      uint32 operand[kPart / 16][4];
      as_operand<T, kPart>(operand, p);
      multiply_nn<kWidth, kPart>(value_sums, operand, part_d_outs);
      as_operand<T, kPart>(operand, dp);
      multiply_nn<kWidth, kPart>(key_sums, operand, part_queries);
    }
    head = next_head, query = next_query, stage ^= 1;
  }
  __syncthreads();
  const float factor[2] = {1.0f, 1.0f};
  dk += key_head * shape.size;
  dv += key_head * shape.size;
  store_rows<kWidth>(dk, key_stride, shape.size, first, queries, key_sums, factor, query_tiles);
  store_rows<kWidth>(dv, key_stride, shape.size, first, queries, value_sums, factor, d_out_tiles);
}
