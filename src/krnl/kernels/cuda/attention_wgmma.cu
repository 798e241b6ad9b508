// Attention of 16-bit elements on Hopper; the scores are never in memory (Dao 2023, FlashAttention-2; Shah et al. 2024,
// FlashAttention-3).
//
//   S = Q Kᵀ          P = softmax(scale S)      O = P V
//   dP = dO Vᵀ        dS = P ∘ (dP - rowsum(dO ∘ O))
//   dQ = scale dS K   dK = scale dSᵀ Q          dV = Pᵀ dO
//
// A block has some rows of one head in shared memory: queries in the forward pass and for dQ, keys and values for dK
// and dV. One warpgroup fetches the other side in tiles, the others multiply, 64 rows each. P and dS go from the result
// of one product into the operand of the next without leaving the registers. Products run while exponentials are taken.
//
// Rows of [n, h, d] lie h·d elements apart, d is kWidth. Every live query sees a key, and all keys from the first to
// the last that a block sees hold finite numbers; other rows may hold anything.
#include "attention.h"
#include "exchange.h"
#include "staging.h"

constexpr int kWarpRows = 16, kConsumerRows = 64;
// Tiles that pass by: their rows, and how many of each of two matrices are in shared memory.
constexpr int kKeys = 128, kKeyStages = 2, kQueries = 64, kQueryStages = 4;
constexpr int kForgetBarrier = 1, kTurnBarrier = 2;

// Warpgroups that multiply: in the forward pass, small heads leave registers for three.
template <int kWidth>
constexpr int kForwardConsumers = kWidth == 64 ? 3 : 2;
constexpr int kGradientConsumers = 2, kGradientRows = kGradientConsumers * kConsumerRows;
template <int kConsumers>
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
// Of a thread; what all have together is 504 or 512.
constexpr int fetch_registers(int consumers) { return consumers == 2 ? 24 : 32; }
constexpr int multiply_registers(int consumers) { return consumers == 2 ? 240 : 160; }

// Rows of a head in shared memory, in strips of kStrip columns as the copy engine brings them. Of the last strip only
// what belongs to the head is used.
template <int kRows, int kWidth>
struct Tile {
  static constexpr int kStrips = pieces(kWidth, kStrip), kBytesOfStrip = kRows * kStrip * 2;
  static constexpr int kBytes = kStrips * kBytesOfStrip;

  uint8 *bytes;

  __device__ void fetch(const TensorMap *map, int column, int row, uint64 *barrier) const {
#pragma unroll
    for (int strip = 0; strip < kStrips; strip++)
      fetch_box(bytes + strip * kBytesOfStrip, map, barrier, column + strip * kStrip, row);
  }

  // Operands of a product over 16 columns, with rows from `row` on, and over 16 rows, with all columns.
  __device__ uint64 columns(int part, int row = 0) const {
    constexpr int kParts = kStrip / 16;
    return describe(bytes + part / kParts * kBytesOfStrip + row * kStrip * 2 + part % kParts * 32, kBytesOfStrip);
  }
  __device__ uint64 rows(int part) const { return describe(bytes + part * 16 * kStrip * 2, kBytesOfStrip); }

  // Rows from `row` on become zeros: what they hold would reach sums even if multiplied by zero. All consumers call it.
  __device__ void forget(int row) const {
    const int threads = blockDim.x - kWarpgroup, vectors = (kRows - row) * 8;
    for (int strip = 0; strip < kStrips; strip++)
      for (int i = threadIdx.x - kWarpgroup; i < vectors; i += threads)
        reinterpret_cast<uint4 *>(bytes + strip * kBytesOfStrip + row * kStrip * 2)[i] = uint4{0, 0, 0, 0};
    fence_async_proxy();
    sync_threads(kForgetBarrier, threads);
  }
};

// Tiles that come one after another, the last kStages of them in shared memory.
template <int kRows, int kWidth, int kStages, int kConsumers>
struct Ring {
  using Tile = ::Tile<kRows, kWidth>;
  static constexpr int kBytes = kStages * Tile::kBytes, kBarriers = 2 * kStages;

  uint8 *tiles;
  uint64 *barriers;

  __device__ uint64 *full(uint32 i) const { return barriers + i % kStages; }
  __device__ uint64 *empty(uint32 i) const { return full(i) + kStages; }
  __device__ Tile tile(uint32 i) const { return {tiles + i % kStages * Tile::kBytes}; }

  __device__ void init() const {
    for (int i = 0; i < kStages; i++) {
      init_barrier(full(i), 1);
      init_barrier(empty(i), kConsumers * kWarpgroup / kWarp);
    }
  }

  // Tile i, with `more` bytes that the caller fetches too.
  __device__ void fetch(uint32 i, const TensorMap *map, int column, int row, int more = 0) const {
    wait(empty(i), i / kStages % 2 ^ 1);
    arrive_and_expect(full(i), Tile::kBytes + more);
    tile(i).fetch(map, column, row, full(i));
  }

  __device__ Tile get(uint32 i) const {
    wait(full(i), i / kStages % 2);
    return tile(i);
  }
  __device__ void release(uint32 i) const {
    if (threadIdx.x % kWarp == 0) arrive(empty(i));
  }
};

// sums = rows otherᵀ, for 64 rows from `row` on and the kColumns rows of the other tile.
template <typename T, int kRows, int kWidth, int kColumns>
__device__ __forceinline__ void multiply_nt(float (&sums)[kColumns / 2], Tile<kRows, kWidth> rows, int row,
                                            Tile<kColumns, kWidth> other) {
  begin_products();
#pragma unroll
  for (int part = 0; part < kWidth / 16; part++)
    Product<T, kColumns, false, false>::add(sums, rows.columns(part, row), other.columns(part), part > 0);
  end_products();
}

// sums (+)= a tile
template <typename T, int kRows, int kWidth>
__device__ __forceinline__ void multiply_nn(float (&sums)[kWidth / 2], const uint32 (&a)[kRows / 16][4],
                                            Tile<kRows, kWidth> tile, bool adds) {
  pin(sums);
  begin_products();
#pragma unroll
  for (int part = 0; part < kRows / 16; part++)
    ProductFromRegisters<T, kWidth, true>::add(sums, a[part], tile.rows(part), adds || part > 0);
  end_products();
}

// Results of a product as operand a of the next.
template <typename T, int kCount>
__device__ __forceinline__ void as_operand(uint32 (&a)[kCount / 8][4], const float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount / 2; i++) a[i / 4][i % 4] = pack<T>(x[2 * i], x[2 * i + 1]);
}

// Values of columns, of which the first is `first`, outside of those that a row sees become `hidden`.
template <int kCount>
__device__ __forceinline__ void hide(float (&x)[kCount], float hidden, int first, const int (&from)[2],
                                     const int (&to)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    const int column = first + threadIdx.x % 4 * 2 + i / 4 * 8 + i % 2, half = i / 2 % 2;
    if (column < from[half] || column >= to[half]) x[i] = hidden;
  }
}

// Of a thread that multiplies: its warp's first row in the block, and the first of its two rows, of which the other
// lies eight rows below.
__device__ inline int warp_row() { return (threadIdx.x - kWarpgroup) / kWarp * kWarpRows; }
__device__ inline int thread_row() { return warp_row() + threadIdx.x % kWarp / 4; }

constexpr int kStagingColumns(int width) { return width % 64 == 0 ? 64 : width % 32 == 0 ? 32 : 16; }
template <typename T, int kWidth>
using Stage = Staging<T, kStagingColumns(kWidth)>;

// Writes a warp's 16 rows, as far as they are below `rows_left`. `factor` is for the upper and for the lower eight.
template <typename T, int kWidth>
__device__ __forceinline__ void write_rows(T *to, int stride, int rows_left, const float (&sums)[kWidth / 2],
                                           const float (&factor)[2], uint8 *staging) {
  constexpr int kColumns = kStagingColumns(kWidth);
  const Stage<T, kWidth> stage = {staging + warp_row() / kWarpRows * Stage<T, kWidth>::kBytes};
#pragma unroll
  for (int piece = 0; piece < kWidth / kColumns; piece++) {
#pragma unroll
    for (int group = 0; group < kColumns / 16; group++) {
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; i++) x[i] = sums[piece * kColumns / 2 + group * 8 + i] * factor[i / 2 % 2];
      stage.put(group, x);
    }
    stage.write(to + piece * kColumns, stride, rows_left, kColumns);
  }
}

struct ForwardMaps {
  TensorMap q, k, v;
};

// The softmax of a thread's two rows so far.
struct Softmax {
  // Below any score. It is finite, so that its distance to a hidden score, -infinity, is defined.
  static constexpr float kNoScore = -1e30f;

  float scale;  // with which scores are exponents of two
  float top[2] = {kNoScore, kNoScore}, total[2] = {0.0f, 0.0f};  // total: of this thread's columns

  // Scores become exponentials relative to the largest so far; what was summed before is to be multiplied by `factor`.
  template <int kCount>
  __device__ __forceinline__ void add(float (&scores)[kCount], float (&factor)[2]) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
      float new_top = top[half];
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) new_top = fmaxf(new_top, fmaxf(scores[i], scores[i + 1]));
      new_top = max_of_four(new_top);
      factor[half] = power_of_two((top[half] - new_top) * scale);
      top[half] = new_top;
      float sum = 0.0f;
#pragma unroll
      for (int i = 2 * half; i < kCount; i += 4) {
#pragma unroll
        for (int j = i; j < i + 2; j++) {
          scores[j] = power_of_two(fmaf(scores[j], scale, -new_top * scale));
          sum += scores[j];
        }
      }
      total[half] = fmaf(total[half], factor[half], sum);
    }
  }
};

// o and lse of a block of queries. The last ones, which see the most keys in training, come first.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads<kForwardConsumers<kWidth>>, 1)
    attention_forward(const __grid_constant__ ForwardMaps maps, const int32 *start, const int32 *stop,
                      const int32 *live, T *o, float *lse, const __grid_constant__ Shape shape, int32 beside) {
  constexpr int kConsumers = kForwardConsumers<kWidth>, kRows = kConsumers * kConsumerRows;
  using Rows = Ring<kRows, kWidth, 1, kConsumers>;
  using Tiles = Ring<kKeys, kWidth, kKeyStages, kConsumers>;
  extern __shared__ __align__(1024) uint8 shared[];  // 1,024 bytes is the period of the swizzle
  __shared__ uint64 barriers[Rows::kBarriers + 2 * Tiles::kBarriers];
  const Rows q = {shared, barriers};
  const Tiles k = {q.tiles + Rows::kBytes, q.barriers + Rows::kBarriers};
  const Tiles v = {k.tiles + Tiles::kBytes, k.barriers + Tiles::kBarriers};
  uint8 *const staging = v.tiles + Tiles::kBytes;
  if (threadIdx.x == 0) {
    q.init();
    k.init();
    v.init();
    fence_barrier_init();
  }
  __syncthreads();
  const int head = blockIdx.x % shape.heads, key_head = head / (shape.heads / shape.key_heads);
  const int block_first = (shape.blocks - 1 - int(blockIdx.x) / shape.heads) * kRows;
  const PreviousLaunch previous(beside);
  const int queries = *live;
  if (block_first >= queries) return;
  if (threadIdx.x == 0) q.fetch(0, &maps.q, head * kWidth, block_first);
  const Seen seen = seen_by(start, stop, block_first, kRows, queries);
  const int count = pieces(seen.stop - seen.first, kKeys);

  if (threadIdx.x < kWarpgroup) {
    give_registers<fetch_registers(kConsumers)>();
    if (threadIdx.x == 0) {
#pragma unroll 1  // registers are few
      for (int i = 0; i < count; i++) {
        k.fetch(i, &maps.k, key_head * kWidth, seen.first + i * kKeys);
        v.fetch(i, &maps.v, key_head * kWidth, seen.first + i * kKeys);
      }
    }
  } else {
    take_registers<multiply_registers(kConsumers)>();
    const int consumer = threadIdx.x / kWarpgroup - 1, next = (consumer + 1) % kConsumers;
    const int first = block_first + warp_row();
    const Seen mine = seen_by(start, stop, first, kWarpRows, queries);
    int from[2], to[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int query = block_first + thread_row() + half * 8;
      from[half] = query < queries ? start[query] : 0;
      to[half] = query < queries ? stop[query] : 0;
    }
    Softmax softmax = {shape.scale * kLog2E};
    float out[kWidth / 2], scores[kKeys / 2], factor[2];
    uint32 p[kKeys / 16][4];
    // What becomes of products with keys i.
    const auto finish_scores = [&](int i) {
      pin(scores);
      k.release(i);
      const int key = seen.first + i * kKeys;
      if (!mine.all(key, kKeys)) hide(scores, -infinity(), key, from, to);
      softmax.add(scores, factor);
      pin(scores);
    };
    // And of those with values i - 1, before p is that of keys i.
    const auto finish_sums = [&](int i) {
      wait_products<0>();
      pin(out);
      if (i > 0) v.release(i - 1);
#pragma unroll
      for (int j = 0; j < kWidth / 2; j++) out[j] *= factor[j / 2 % 2];
      as_operand<T>(p, scores);
    };

    multiply_nt<T>(scores, q.get(0), consumer * kConsumerRows, k.get(0));
    wait_products<0>();
    finish_scores(0);
    for (int i = 1; i < count; i++) {
      // Here and not at the end of the last round, where the compiler would wait before it takes exponentials.
      finish_sums(i - 1);
      // Consumers take turns: while one takes exponentials, the products of another run.
      if (i > 1 || consumer > 0) sync_threads(kTurnBarrier + consumer, 2 * kWarpgroup);
      multiply_nt<T>(scores, q.tile(0), consumer * kConsumerRows, k.get(i));
      multiply_nn<T>(out, p, v.get(i - 1), i > 1);
      if (i + 1 < count || next > 0) arrive_threads(kTurnBarrier + next, 2 * kWarpgroup);
      wait_products<1>();
      finish_scores(i);
    }
    finish_sums(count - 1);
    const auto last = v.get(count - 1);
    const int rows = seen.stop - seen.first - (count - 1) * kKeys;
    if (rows < kKeys) last.forget(rows);
    multiply_nn<T>(out, p, last, count > 1);
    wait_products<0>();
    pin(out);

#pragma unroll
    for (int half = 0; half < 2; half++) {
      const float total = sum_of_four(softmax.total[half]);
      const int query = block_first + thread_row() + half * 8;
      factor[half] = 1.0f / total;
      if (threadIdx.x % 4 == 0 && query < queries)
        lse[uint64(query) * shape.heads + head] = fmaf(softmax.top[half], shape.scale, logf(total));
    }
    const int stride = shape.heads * kWidth;
    write_rows<T, kWidth>(o + uint64(first) * stride + head * kWidth, stride, queries - first, out, factor, staging);
  }
}

// What the gradients want to know of each query and head: lse in units of log 2, and delta = rowsum(dO ∘ O). They lie
// as [2, h, blocks · kGradientRows]; rows that are not live get zeros.
constexpr int kLanesOfRow = 4;

template <typename T, int kWidth>
__global__ void __launch_bounds__(kGradientRows *kLanesOfRow)
    attention_row_terms(const T *d_out, const T *o, const float *lse, const int32 *live, float *terms, Shape shape,
                        int32 beside) {
  const int head = blockIdx.x % shape.heads;
  const int query = blockIdx.x / shape.heads * kGradientRows + threadIdx.x / kLanesOfRow;
  const uint64 rows = uint64(shape.blocks) * kGradientRows;
  const PreviousLaunch previous(beside);
  const bool there = query < *live;
  float sum = 0.0f;
  if (there) {
    const uint64 at = (uint64(query) * shape.heads + head) * kWidth;
#pragma unroll
    for (int column = threadIdx.x % kLanesOfRow * 8; column < kWidth; column += kLanesOfRow * 8) {
      const uint4 x = *reinterpret_cast<const uint4 *>(d_out + at + column);
      const uint4 y = *reinterpret_cast<const uint4 *>(o + at + column);
      const auto add = [&](uint32 x, uint32 y) {
        const float2 a = unpack<T>(x), b = unpack<T>(y);
        sum = fmaf(a.x, b.x, fmaf(a.y, b.y, sum));
      };
      add(x.x, y.x), add(x.y, y.y), add(x.z, y.z), add(x.w, y.w);
    }
  }
  sum = sum_of_four(sum);
  if (threadIdx.x % kLanesOfRow == 0) {
    terms[head * rows + query] = there ? lse[uint64(query) * shape.heads + head] * kLog2E : 0.0f;
    terms[(shape.heads + head) * rows + query] = sum;
  }
}

struct GradientMaps {
  TensorMap q, k, v, d_out;
};

// dq of a block of queries.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads<kGradientConsumers>, 1)
    attention_query_gradients(const __grid_constant__ GradientMaps maps, const float *terms, const int32 *start,
                              const int32 *live, T *dq, const __grid_constant__ Shape shape, int32 beside) {
  using Rows = Ring<kGradientRows, kWidth, 1, kGradientConsumers>;
  using Tiles = Ring<kKeys, kWidth, kKeyStages, kGradientConsumers>;
  extern __shared__ __align__(1024) uint8 shared[];
  __shared__ uint64 barriers[2 * Rows::kBarriers + 2 * Tiles::kBarriers];
  const Rows q = {shared, barriers};
  const Rows d_out = {q.tiles + Rows::kBytes, q.barriers + Rows::kBarriers};
  const Tiles k = {d_out.tiles + Rows::kBytes, d_out.barriers + Rows::kBarriers};
  const Tiles v = {k.tiles + Tiles::kBytes, k.barriers + Tiles::kBarriers};
  uint8 *const staging = v.tiles + Tiles::kBytes;
  if (threadIdx.x == 0) {
    q.init();
    d_out.init();
    k.init();
    v.init();
    fence_barrier_init();
  }
  __syncthreads();
  const int head = blockIdx.x % shape.heads, key_head = head / (shape.heads / shape.key_heads);
  const int block_first = (shape.blocks - 1 - int(blockIdx.x) / shape.heads) * kGradientRows;
  const PreviousLaunch previous(beside);
  const int queries = *live;
  if (block_first >= queries) return;
  if (threadIdx.x == 0) {
    q.fetch(0, &maps.q, head * kWidth, block_first);
    d_out.fetch(0, &maps.d_out, head * kWidth, block_first);
  }
  const Seen seen = seen_by(start, nullptr, block_first, kGradientRows, queries);
  const int count = pieces(seen.stop - seen.first, kKeys);

  if (threadIdx.x < kWarpgroup) {
    give_registers<fetch_registers(kGradientConsumers)>();
    if (threadIdx.x == 0) {
#pragma unroll 1  // registers are few
      for (int i = 0; i < count; i++) {
        k.fetch(i, &maps.k, key_head * kWidth, seen.first + i * kKeys);
        v.fetch(i, &maps.v, key_head * kWidth, seen.first + i * kKeys);
      }
    }
  } else {
    take_registers<multiply_registers(kGradientConsumers)>();
    const int row = (threadIdx.x / kWarpgroup - 1) * kConsumerRows, first = block_first + warp_row();
    const Seen mine = seen_by(start, nullptr, first, kWarpRows, queries);
    int from[2], to[2];
    float lse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int query = block_first + thread_row() + half * 8;
      const uint64 rows = uint64(shape.blocks) * kGradientRows;
      from[half] = query < queries ? start[query] : 0;
      to[half] = query + 1;
      lse[half] = terms[head * rows + query];
      delta[half] = terms[(shape.heads + head) * rows + query];
    }
    const float scale = shape.scale * kLog2E;
    float sums[kWidth / 2], p[kKeys / 2], dp[kKeys / 2];
    uint32 ds[kKeys / 16][4];
    q.get(0);
    d_out.get(0);
    for (int i = 0; i < count; i++) {
      const int key = seen.first + i * kKeys;
      const auto keys = k.get(i), values = v.get(i);
      if (key + kKeys > seen.stop) {
        keys.forget(seen.stop - key);
        values.forget(seen.stop - key);
      }
      multiply_nt<T>(p, q.tile(0), row, keys);
      wait_products<1>();
      pin(sums);
      if (i > 0) k.release(i - 1);
      multiply_nt<T>(dp, d_out.tile(0), row, values);
      wait_products<1>();
      pin(p);
#pragma unroll
      for (int j = 0; j < kKeys / 2; j++) p[j] = power_of_two(fmaf(p[j], scale, -lse[j / 2 % 2]));
      if (!mine.all(key, kKeys)) hide(p, 0.0f, key, from, to);
      wait_products<0>();
      pin(dp);
      v.release(i);
#pragma unroll
      for (int j = 0; j < kKeys / 2; j++) dp[j] = p[j] * (dp[j] - delta[j / 2 % 2]);
      as_operand<T>(ds, dp);
      multiply_nn<T>(sums, ds, keys, i > 0);
    }
    wait_products<0>();
    pin(sums);
    const float factor[2] = {shape.scale, shape.scale};
    const int stride = shape.heads * kWidth;
    write_rows<T, kWidth>(dq + uint64(first) * stride + head * kWidth, stride, queries - first, sums, factor, staging);
  }
}

// The first query that does not see `key` any more, if it is from `first` to `stop`.
__device__ inline int end_of_view(const int32 *start, int key, int first, int stop) {
  while (first < stop) {
    const int middle = first + (stop - first) / 2;
    if (start[middle] <= key) first = middle + 1;
    else stop = middle;
  }
  return first;
}

// dk and dv of a block of keys: one sum over the query heads that read them and the queries that see them. S and dP are
// transposed, rows are keys: so P and dS are what dV and dK multiply from the left. Where keys are few, the blocks of a
// cluster share the sum.
template <typename T, int kWidth, int kSplit>
__global__ void __launch_bounds__(kThreads<kGradientConsumers>, 1)
    attention_key_gradients(const __grid_constant__ GradientMaps maps, const float *terms, const int32 *start,
                            const int32 *live, T *dk, T *dv, const __grid_constant__ Shape shape, int32 beside) {
  using Rows = Ring<kGradientRows, kWidth, 1, kGradientConsumers>;
  using Tiles = Ring<kQueries, kWidth, kQueryStages, kGradientConsumers>;
  extern __shared__ __align__(1024) uint8 shared[];
  alignas(16) __shared__ float lse_tiles[kQueryStages][kQueries], delta_tiles[kQueryStages][kQueries];
  __shared__ uint64 barriers[2 * Rows::kBarriers + 2 * Tiles::kBarriers];
  const Rows k = {shared, barriers};
  const Rows v = {k.tiles + Rows::kBytes, k.barriers + Rows::kBarriers};
  const Tiles q = {v.tiles + Rows::kBytes, v.barriers + Rows::kBarriers};
  const Tiles d_out = {q.tiles + Tiles::kBytes, q.barriers + Tiles::kBarriers};
  uint8 *const staging = d_out.tiles + Tiles::kBytes;
  if (threadIdx.x == 0) {
    k.init();
    v.init();
    q.init();
    d_out.init();
    fence_barrier_init();
  }
  __syncthreads();
  const int key_head = blockIdx.x / kSplit % shape.key_heads, group = shape.heads / shape.key_heads;
  const int block_first = blockIdx.x / kSplit / shape.key_heads * kGradientRows;
  const PreviousLaunch previous(beside);
  const int queries = *live;
  if (block_first >= queries) return;
  if (threadIdx.x == 0) {
    k.fetch(0, &maps.k, key_head * kWidth, block_first);
    v.fetch(0, &maps.v, key_head * kWidth, block_first);
  }
  // Until `all` the block's first key is seen, until `stop` the last.
  const int all = first_past(start, block_first, block_first, queries);
  const int stop = first_past(start, block_first + kGradientRows - 1, all, queries);
  // Tiles of one query head after the other, and this block's share of them.
  const int of_head = pieces(stop - block_first, kQueries), all_tiles = group * of_head;
  const int rank = kSplit > 1 ? cluster_rank() : 0;
  const int first_tile = all_tiles * rank / kSplit, count = all_tiles * (rank + 1) / kSplit - first_tile;
  const uint64 rows = uint64(shape.blocks) * kGradientRows;

  if (threadIdx.x < kWarpgroup) {
    give_registers<fetch_registers(kGradientConsumers)>();
    const auto fetch = [&](Tiles ring, const TensorMap &map, const float *terms, float (&tiles)[kQueryStages][kQueries]) {
#pragma unroll 1  // registers are few
      for (int i = 0; i < count; i++) {
        const int head = key_head * group + (first_tile + i) / of_head;
        const int query = block_first + (first_tile + i) % of_head * kQueries;
        ring.fetch(i, &map, head * kWidth, query, sizeof(tiles[0]));
        fetch_bytes(tiles[i % kQueryStages], terms + head * rows + query, sizeof(tiles[0]), ring.full(i));
      }
    };
    if (threadIdx.x == 0) fetch(q, maps.q, terms, lse_tiles);
    if (threadIdx.x == kWarp) fetch(d_out, maps.d_out, terms + shape.heads * rows, delta_tiles);
    __syncwarp();
    if constexpr (kSplit > 1) share_nothing();
  } else {
    take_registers<multiply_registers(kGradientConsumers)>();
    const int row = (threadIdx.x / kWarpgroup - 1) * kConsumerRows, first = block_first + warp_row();
    int from[2], to[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
      from[half] = block_first + thread_row() + half * 8;
      to[half] = end_of_view(start, from[half], all, stop);
    }
    const int all_to = __shfl_sync(~0u, to[0], 0);
    const float scale = shape.scale * kLog2E;
    float key_sums[kWidth / 2] = {}, value_sums[kWidth / 2] = {}, p[kQueries / 2], dp[kQueries / 2];
    uint32 p_operand[kQueries / 16][4], ds_operand[kQueries / 16][4];
    pin(key_sums);
    pin(value_sums);
    // Blocks without tiles wait too: peers store sums where these land.
    k.get(0);
    v.get(0);
    int query = block_first + first_tile % of_head * kQueries;
    for (int i = 0; i < count; i++) {
      const auto q_tile = q.get(i), d_out_tile = d_out.get(i);
      if (query + kQueries > stop) {
        q_tile.forget(stop - query);
        d_out_tile.forget(stop - query);
      }
      multiply_nt<T>(p, k.tile(0), row, q_tile);
      wait_products<1>();
      pin(key_sums);
      pin(value_sums);
      if (i > 0) {
        q.release(i - 1);
        d_out.release(i - 1);
      }
      multiply_nt<T>(dp, v.tile(0), row, d_out_tile);
      wait_products<1>();
      pin(p);
      const int column = threadIdx.x % 4 * 2;
#pragma unroll
      for (int j = 0; j < kQueries / 2; j += 4) {
        const float2 lse = *reinterpret_cast<const float2 *>(&lse_tiles[i % kQueryStages][j * 2 + column]);
        p[j] = power_of_two(fmaf(p[j], scale, -lse.x)), p[j + 1] = power_of_two(fmaf(p[j + 1], scale, -lse.y));
        p[j + 2] = power_of_two(fmaf(p[j + 2], scale, -lse.x)), p[j + 3] = power_of_two(fmaf(p[j + 3], scale, -lse.y));
      }
      if (query < first + kWarpRows - 1 || query + kQueries > all_to) hide(p, 0.0f, query, from, to);
      as_operand<T>(p_operand, p);
      multiply_nn<T>(value_sums, p_operand, d_out_tile, true);
      wait_products<1>();
      pin(dp);
#pragma unroll
      for (int j = 0; j < kQueries / 2; j += 4) {
        const float2 delta = *reinterpret_cast<const float2 *>(&delta_tiles[i % kQueryStages][j * 2 + column]);
        dp[j] = p[j] * (dp[j] - delta.x), dp[j + 1] = p[j + 1] * (dp[j + 1] - delta.y);
        dp[j + 2] = p[j + 2] * (dp[j + 2] - delta.x), dp[j + 3] = p[j + 3] * (dp[j + 3] - delta.y);
      }
      as_operand<T>(ds_operand, dp);
      multiply_nn<T>(key_sums, ds_operand, q_tile, true);
      query += kQueries;
      if (query >= stop) query = block_first;
    }
    wait_products<0>();
    pin(key_sums);
    pin(value_sums);
    const int stride = shape.key_heads * kWidth;
    const uint64 at = uint64(first) * stride + key_head * kWidth;
    if constexpr (kSplit == 1) {
      const float scales[2] = {shape.scale, shape.scale}, ones[2] = {1.0f, 1.0f};
      write_rows<T, kWidth>(dk + at, stride, queries - first, key_sums, scales, staging);
      write_rows<T, kWidth>(dv + at, stride, queries - first, value_sums, ones, staging);
    } else {
      // Blocks of the first half write dk, each some columns.
      constexpr int kHalf = kSplit / 2, kColumns = kWidth / kHalf;
      static_assert(kColumns % 16 == 0, "a block writes whole matrices");
      static_assert(kWidth * kGradientConsumers * kWarpgroup * 4 <= 2 * (Rows::kBytes + Tiles::kBytes), "there is room");
      const bool keys = rank < kHalf;
      const float scale = keys ? shape.scale : 1.0f, scales[2] = {scale, scale};
      float sums[kWidth], mine[kWidth / kSplit];
#pragma unroll
      for (int j = 0; j < kWidth / 2; j++) sums[j] = key_sums[j], sums[kWidth / 2 + j] = value_sums[j];
      share<kSplit, kGradientConsumers * kWarpgroup>(sums, mine, shared);
      T *const to = (keys ? dk : dv) + at + rank % kHalf * kColumns;
      write_rows<T, kColumns>(to, stride, queries - first, mine, scales, staging);
    }
  }
}
