// Matrix products of 16-bit elements on Hopper: sums of up to three products and an adapter's, and what becomes of
// them.
//
// A block has one warpgroup that fetches tiles of both operands into a ring in shared memory, and one or two that
// multiply, 64 rows each. Blocks go from tile to tile of the result, so that the next tile's operands arrive while the
// last is written. Where much is written, the warps that have nothing to fetch do it: they are handed the sums in
// shared memory, and the next tile is multiplied meanwhile. Where tiles are too few, the blocks of a cluster share
// one: each sums a part of K, then part of the columns of all, in fixed order.
#include "exchange.h"
#include "layout.h"
#include "staging.h"
#include "swiglu.h"

enum Epilogue {
  kStore,             // y = scale ∘ sum + bias, or sum + bias + residual
  kStoreFloats,       // y = scale ∘ sum + bias, y in float
  kAccumulate,        // y += sum, y in float
  kAccumulateAcross,  // yᵀ += sum, y in float
  kSwiglu,            // gate and up in one tile, half of its columns each; act = silu(gate) ∘ up
  kSwigluBackward,    // sum is dact: dgate, dup and act
};

constexpr int kPairs = 3, kMembers = 3;
// Of a thread, where two warpgroups multiply: what all three have together is 504.
constexpr int kFetchRegisters = 72, kMultiplyRegisters = 216;
constexpr int kFetchAndWriteRegisters = 136, kMultiplyOnlyRegisters = 184;

// Results of as many rows that are computed side by side: their columns, the first of their tiles along N, the rank of
// their adapter, and elements from a row to the next of y, residual, gate, up, dgate, dup and act.
struct Member {
  int32 columns, first_tile, rank, stride;
};

struct Shape {
  int32 rows, pairs, members, tiles;  // tiles along N, of all members
  int32 depth[kPairs];  // of each pair, or of each member's only pair
  Member member[kMembers];
};

// Maps of a and b: those of pairs, or those of each member's only pair; then those of each member's adapter.
struct Maps {
  TensorMap a[kPairs], b[kPairs], u[kMembers], adapter[kMembers];
};

struct Results {
  void *y[kMembers];
  const float *scale[kMembers], *bias[kMembers];
  const void *residual;
  void *gate, *up, *dgate, *dup;
};

template <Layout kLayout, int kTileM, int kTileN>
struct Ring {
  static constexpr bool kAlongM = kLayout == kTN, kAlongN = kLayout != kNT;
  static constexpr int kBytesA = kTileM * kDepth * 2, kBytesB = kTileN * kDepth * 2, kBytes = kBytesA + kBytesB;

  uint8 *tiles;
  uint64 *full, *empty;

  __device__ uint8 *a(int stage) const { return tiles + stage * kBytes; }
  __device__ uint8 *b(int stage) const { return a(stage) + kBytesA; }
};

// Where the user of so many barriers is that are taken in turn: at which, and in which parity of its phase.
template <int kStages>
struct Turn {
  int stage = 0, parity = 0;
  __device__ void next() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
};

// A tile of the result.
struct Tile {
  int row, member, column;
};

template <int kTileM, int kTileN>
__device__ inline Tile locate(const Shape &shape, int index, int rows_of_tiles) {
  const int group = kTileGroup * shape.tiles, first = index / group * kTileGroup, within = index % group;
  const int height = min_of(rows_of_tiles - first, kTileGroup), n = within / height;
  int member = 0;
  while (member + 1 < shape.members && n >= shape.member[member + 1].first_tile) member++;
  return {(first + within % height) * kTileM, member, (n - shape.member[member].first_tile) * kTileN};
}

// A step along K: which product of the sum, and the first of its 64 values.
struct Step {
  int pair, k;
};

template <typename T, Layout kLayout, Epilogue kEpilogue, int kTileM, int kTileN, int kStages, int kSplit,
          bool kHandsOver>
struct Kernel {
  using Operands = Ring<kLayout, kTileM, kTileN>;
  static constexpr int kConsumers = kTileM / 64;
  static constexpr bool kAlongM = Operands::kAlongM, kAlongN = Operands::kAlongN;
  // With SwiGLU a tile holds as many columns of gate as of up.
  static constexpr int kColumns = kEpilogue == kSwiglu ? kTileN / 2 : kTileN;
  static constexpr int kSums = kTileN / 2;  // a thread's
  static constexpr bool kFloats = kEpilogue == kStoreFloats || kEpilogue == kAccumulate ||
                                  kEpilogue == kAccumulateAcross;
  // gate and up come while products run, for the whole tile; what is only written goes in smaller pieces.
  static constexpr bool kReads = kEpilogue == kSwigluBackward;
  static constexpr int kShare = kSums / kSplit, kShareColumns = kColumns / kSplit;
  static constexpr int kSmallPiece = kShareColumns % 64 == 0 ? 64 : kShareColumns % 32 == 0 ? 32 : 16;
  static constexpr int kPiece = kReads ? kShareColumns : kSmallPiece;
  using Stage = Staging<T, kPiece>;
  // Sums of a warp that are handed over, 16 rows. The fetching warpgroup's other warps write them. Half of the columns
  // go at a time, which leaves room for one more stage of the ring; the others wait in registers as 16-bit elements.
  using Handed = Staging<T, kTileN / 2>;
  static constexpr int kGroups = kTileN / 32;  // of 16 columns, in a half
  using Packed = uint32[kGroups][4];
  static constexpr int kMultiplyingWarps = kConsumers * kWarpgroup / kWarp, kWriters = kWarpgroup / kWarp - 1;

  const Maps &maps;
  const Shape &shape;
  const Results &results;
  Operands ring;
  uint8 *staging;
  uint64 *handed, *taken;  // a barrier for each warp that multiplies
  int live, rank;          // rank: in the cluster

  __device__ int rows() const { return kLayout == kTN ? shape.rows : min_of(live, shape.rows); }
  __device__ int rows_of_tiles() const { return pieces(rows(), kTileM); }
  __device__ int tiles() const { return rows_of_tiles() * shape.tiles; }
  __device__ int depth(int pair) const { return kLayout == kTN ? live : shape.depth[pair]; }

  // Steps of a tile: those of its pairs, then those of its adapter. gate and up count as one member here.
  __device__ bool has_members() const { return kEpilogue != kSwiglu && shape.members > 1; }
  __device__ int pair_steps(int member) const {
    if (has_members()) return pieces(depth(member), kDepth);
    int steps = 0;
    for (int pair = 0; pair < shape.pairs; pair++) steps += pieces(depth(pair), kDepth);
    return steps;
  }
  // gate and up have one adapter whose B is block-diagonal.
  __device__ int rank_of(int member) const {
    return kEpilogue == kSwiglu ? shape.member[0].rank + shape.member[1].rank : shape.member[member].rank;
  }
  // This block's share of `steps`.
  __device__ int first_step(int steps) const { return steps * rank / kSplit; }
  __device__ int end_step(int steps) const { return steps * (rank + 1) / kSplit; }

  __device__ Step step(int member, int index) const {
    if (has_members()) return {member, index * kDepth};
    int pair = 0;
    for (; pair + 1 < shape.pairs && index >= pieces(depth(pair), kDepth); pair++) index -= pieces(depth(pair), kDepth);
    return {pair, index * kDepth};
  }

  __device__ void fetch() {
    Turn<kStages> turn;
    for (int index = blockIdx.x / kSplit; index < tiles(); index += gridDim.x / kSplit) {
      const Tile tile = locate<kTileM, kColumns>(shape, index, rows_of_tiles());
      const int steps = pair_steps(tile.member), all = steps + pieces(rank_of(tile.member), kDepth);
      for (int i = first_step(all); i < end_step(all); i++, turn.next()) {
        wait(&ring.empty[turn.stage], turn.parity ^ 1);
        arrive_and_expect(&ring.full[turn.stage], Operands::kBytes);
        if (i < steps) {
          const Step at = step(tile.member, i);
          fetch_a(turn.stage, &maps.a[at.pair], tile.row, at.k);
          if (kEpilogue == kSwiglu) {
            fetch_b<kColumns>(turn.stage, 0, &maps.b[0], tile.column, at.k);
            fetch_b<kColumns>(turn.stage, kColumns, &maps.b[1], tile.column, at.k);
          } else {
            fetch_b<kTileN>(turn.stage, 0, &maps.b[at.pair], tile.column, at.k);
          }
        } else {
          const int k = (i - steps) * kDepth;
          fetch_a(turn.stage, &maps.u[tile.member], tile.row, k);
          fetch_b<kColumns>(turn.stage, 0, &maps.adapter[tile.member], tile.column, k);
          // What lies before and behind a matrix reads as zeros, which makes the diagonal.
          if (kEpilogue == kSwiglu)
            fetch_b<kColumns>(turn.stage, kColumns, &maps.adapter[1], tile.column, k - shape.member[0].rank);
        }
      }
    }
  }

  __device__ void fetch_a(int stage, const TensorMap *map, int row, int k) {
    if (!kAlongM) return fetch_box(ring.a(stage), map, &ring.full[stage], k, row);
#pragma unroll
    for (int strip = 0; strip < kTileM / kStrip; strip++)
      fetch_box(ring.a(stage) + strip * kStripBytes, map, &ring.full[stage], row + strip * kStrip, k);
  }

  // Columns `column` on, to be columns `place` on of the tile.
  template <int kWidth>
  __device__ void fetch_b(int stage, int place, const TensorMap *map, int column, int k) {
    uint8 *tile = ring.b(stage) + place * kDepth * 2;
    if (!kAlongN) return fetch_box(tile, map, &ring.full[stage], k, column);
#pragma unroll
    for (int strip = 0; strip < kWidth / kStrip; strip++)
      fetch_box(tile + strip * kStripBytes, map, &ring.full[stage], column + strip * kStrip, k);
  }

  __device__ void multiply() {
    Turn<kStages> turn;
    Turn<1> handing;
    float sums[kSums];
    Packed rest;
    bool rests = false;
    for (int index = blockIdx.x / kSplit; index < tiles(); index += gridDim.x / kSplit) {
      const Tile tile = locate<kTileM, kColumns>(shape, index, rows_of_tiles());
      const int steps = pair_steps(tile.member), all = steps + pieces(rank_of(tile.member), kDepth);
      if constexpr (kReads && !kHandsOver) fetch_gate_and_up(tile);
      begin(tile, sums);
      int running = -1;  // the stage whose products may still run
      for (int i = first_step(all); i < end_step(all); i++, turn.next()) {
        if (kHandsOver && rests && i == all / 2) hand_over(rest, handing);
        wait(&ring.full[turn.stage], turn.parity);
        if (kLayout == kTN) forget_dead_rows(turn.stage, live - step(tile.member, i).k);
        begin_products();
#pragma unroll
        for (int k = 0; k < kDepth / 16; k++)
          Product<T, kTileN, kAlongM, kAlongN>::add(sums, a_at(turn.stage, k), b_at(turn.stage, k), 1);
        end_products();
        if (running >= 0) {
          wait_products<1>();
          release(running);
        }
        running = turn.stage;
      }
      wait_products<0>();
      pin(sums);
      if (running >= 0) release(running);
      if constexpr (kHandsOver) {
        Packed first;
        pack_half<0>(sums, first);
        hand_over(first, handing);
        pack_half<1>(sums, rest);
        rests = true;
      } else if constexpr (kSplit > 1) {
        float mine[kShare];
        share<kSplit, kConsumers * kWarpgroup>(sums, mine, ring.tiles);
        finish(tile, mine);
      } else {
        finish(tile, sums);
      }
    }
    if (kHandsOver && rests) hand_over(rest, handing);
  }

  // Sums begin with the residual, where there is one: it comes while the first operands do. Nothing branches around
  // a sum, or the assembler would let products wait for one another.
  __device__ __forceinline__ void begin(const Tile &tile, float (&sums)[kSums]) {
    const T *const residual = kEpilogue == kStore && rank == 0 ? static_cast<const T *>(results.residual) : nullptr;
    const int columns_left = residual ? shape.member[tile.member].columns - tile.column : 0;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = thread_row(tile) + half * 8;
      const T *const from = residual + uint64(row) * stride(tile) + tile.column;
#pragma unroll
      for (int group = 0; group < kTileN / 8; group++) {
        const int column = group * 8 + threadIdx.x % 4 * 2;
        uint32 two = 0;
        if (column < columns_left && row < rows()) two = *reinterpret_cast<const uint32 *>(from + column);
        const float2 x = unpack<T>(two);
        sums[4 * group + 2 * half] = x.x, sums[4 * group + 2 * half + 1] = x.y;
      }
    }
    pin(sums);
  }

  // Operands of the products over 16 values of K.
  __device__ uint64 a_at(int stage, int k) const {
    const uint8 *tile = ring.a(stage) + (threadIdx.x / kWarpgroup - 1) * (64 * kDepth * 2);
    return describe(tile + (kAlongM ? k * 16 * 128 : k * 32), kStripBytes);
  }
  __device__ uint64 b_at(int stage, int k) const {
    return describe(ring.b(stage) + (kAlongN ? k * 16 * 128 : k * 32), kStripBytes);
  }

  __device__ void release(int stage) {
    if (threadIdx.x % kWarp == 0) arrive(&ring.empty[stage]);
  }

  // Tokens from `live` on are zeros: what lies there is not to be read.
  __device__ void forget_dead_rows(int stage, int live) {
    if (live >= kDepth) return;
    constexpr int threads = kConsumers * kWarpgroup;
    const int thread = threadIdx.x - kWarpgroup, vectors = (kDepth - live) * 8;
    for (int strip = 0; strip < (kTileM + kTileN) / kStrip; strip++)
      for (int i = thread; i < vectors; i += threads)
        *reinterpret_cast<uint4 *>(ring.a(stage) + strip * kStripBytes + live * 128 + i * 16) = uint4{0, 0, 0, 0};
    fence_async_proxy();
    sync_threads(1, threads);
  }

  // A warp's part of the tile: 16 rows, and the columns that its block has.
  __device__ static int warp() { return threadIdx.x / kWarp - kWarpgroup / kWarp; }
  __device__ int row(const Tile &tile) const { return tile.row + warp() * 16; }
  __device__ int column(const Tile &tile) const { return tile.column + rank * kShareColumns; }
  __device__ Stage stage(int index) const {
    return {staging + (warp() * (kReads ? 2 : 1) + index) * Stage::kBytes};
  }
  __device__ int stride(const Tile &tile) const { return shape.member[tile.member].stride; }

  __device__ __forceinline__ void fetch_gate_and_up(const Tile &tile) {
    const uint64 at = uint64(row(tile)) * stride(tile) + column(tile);
    const int rows_left = rows() - row(tile), columns_left = shape.member[tile.member].columns - column(tile);
    stage(0).fetch(static_cast<const T *>(results.gate) + at, stride(tile), rows_left, columns_left);
    stage(1).fetch(static_cast<const T *>(results.up) + at, stride(tile), rows_left, columns_left);
  }

  // Writes kPiece columns of y from a stage.
  __device__ __forceinline__ void write(const Stage &stage, void *y, const Tile &tile, int piece) {
    const int at = column(tile) + piece * kPiece;
    stage.write(static_cast<T *>(y) + uint64(row(tile)) * stride(tile) + at, stride(tile), rows() - row(tile),
                shape.member[tile.member].columns - at);
  }

  // What becomes of the sums.
  __device__ __forceinline__ void finish(const Tile &tile, float (&sums)[kShare]) {
    if (const float *scale = results.scale[tile.member])
      dress(tile, sums, scale, [](float x, float scale) { return x * scale; });
    if (const float *bias = results.bias[tile.member])
      dress(tile, sums, bias, [](float x, float bias) { return x + bias; });
    if constexpr (kReads) Stage::fetched();
    if constexpr (kFloats) {
      finish_floats(tile, sums);
    } else if constexpr (kEpilogue == kSwigluBackward) {
#pragma unroll
      for (int group = 0; group < kPiece / 16; group++) {
        uint32 gates[4], ups[4];
        stage(0).get(group, gates);
        stage(1).get(group, ups);
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const SwigluGradient x(sums[group * 8 + 2 * i], unpack<T>(gates[i]).x, unpack<T>(ups[i]).x);
          const SwigluGradient y(sums[group * 8 + 2 * i + 1], unpack<T>(gates[i]).y, unpack<T>(ups[i]).y);
          gates[i] = pack<T>(x.dgate, y.dgate);
          ups[i] = pack<T>(x.dup, y.dup);
          sums[group * 8 + 2 * i] = x.act, sums[group * 8 + 2 * i + 1] = y.act;
        }
        stage(0).put(group, gates);
        stage(1).put(group, ups);
      }
      write(stage(0), results.dgate, tile, 0);
      write(stage(1), results.dup, tile, 0);
#pragma unroll
      for (int group = 0; group < kPiece / 16; group++) stage(0).put(group, &sums[group * 8]);
      write(stage(0), results.y[0], tile, 0);
    } else if constexpr (kEpilogue == kSwiglu) {
      float *const gate = sums, *const up = sums + kShare / 2;
      put(tile, gate, results.gate);
      put(tile, up, results.up);
#pragma unroll
      for (int i = 0; i < kShare / 2; i++) gate[i] *= quick_sigmoid(gate[i]) * up[i];
      put(tile, gate, results.y[0]);
    } else {
      put(tile, sums, results.y[tile.member]);
    }
  }

  // All columns of y, in pieces.
  __device__ __forceinline__ void put(const Tile &tile, const float *sums, void *y) {
#pragma unroll
    for (int piece = 0; piece < kShareColumns / kPiece; piece++) {
#pragma unroll
      for (int group = 0; group < kPiece / 16; group++) stage(0).put(group, sums + piece * kPiece / 2 + group * 8);
      write(stage(0), y, tile, piece);
    }
  }

  // Half of the columns; with SwiGLU, of gate and then of up.
  template <int kHalf>
  __device__ __forceinline__ static void pack_half(const float (&sums)[kSums], Packed &packed) {
#pragma unroll
    for (int group = 0; group < kGroups; group++) {
      constexpr int kOfGate = kEpilogue == kSwiglu ? kGroups / 2 : kGroups;
      const float *const x = sums + (kHalf * kOfGate + group + (group < kOfGate ? 0 : kOfGate)) * 8;
#pragma unroll
      for (int i = 0; i < 4; i++) packed[group][i] = pack<T>(x[2 * i], x[2 * i + 1]);
    }
  }

  __device__ __forceinline__ void hand_over(const Packed &packed, Turn<1> &turn) {
    wait(&taken[warp()], turn.parity ^ 1);
    turn.next();
    const Handed rows{staging + warp() * Handed::kBytes};
#pragma unroll
    for (int group = 0; group < kGroups; group++) rows.put(group, packed[group]);
    __syncwarp();
    if (threadIdx.x % kWarp == 0) arrive(&handed[warp()]);
  }

  __device__ void write_handed() {
    const int writer = threadIdx.x / kWarp - 1;
    T *const act = static_cast<T *>(results.y[0]);
    T *const gate = static_cast<T *>(results.gate), *const up = static_cast<T *>(results.up);
    T *const dgate = static_cast<T *>(results.dgate), *const dup = static_cast<T *>(results.dup);
    Turn<1> turn;
    for (int half = 0, index = blockIdx.x; index < tiles(); index += half * gridDim.x, half ^= 1, turn.next()) {
      Tile tile = locate<kTileM, kColumns>(shape, index, rows_of_tiles());
      tile.column += half * kColumns / 2;
      for (int sender = writer; sender < kMultiplyingWarps; sender += kWriters) {
        const int row = tile.row + sender * 16;
        const uint8 *const sums = staging + sender * Handed::kBytes;
        const Part part{rows() - row, shape.member[0].columns - tile.column,
                        uint64(row) * stride(tile) + tile.column, stride(tile)};
        const auto wait_for_sums = [&] { wait(&handed[sender], turn.parity); };
        if constexpr (kEpilogue == kSwiglu) {
          wait_for_sums();
          write_swiglu<kTileN / 2, Handed::kPitch>(part, sums, gate, up, act);
        } else {
          write_swiglu_backward<kTileN / 2, Handed::kPitch>(part, sums, gate, up, dgate, dup, act, wait_for_sums);
        }
        __syncwarp();
        if (threadIdx.x % kWarp == 0) arrive(&taken[sender]);
      }
    }
  }

  // Where a thread's sums of eight columns begin.
  __device__ int thread_row(const Tile &tile) const { return row(tile) + threadIdx.x % kWarp / 4; }
  __device__ int thread_column(const Tile &tile, int group) const {
    return column(tile) + group * 8 + threadIdx.x % 4 * 2;
  }

  // Each sum, changed by the number of its column.
  template <typename Change>
  __device__ __forceinline__ void dress(const Tile &tile, float (&sums)[kShare], const float *numbers, Change change) {
#pragma unroll
    for (int group = 0; group < kShare / 4; group++) {
      const int column = thread_column(tile, group);
      if (column >= shape.member[tile.member].columns) continue;
      const float x = numbers[column], y = numbers[column + 1];
      sums[4 * group] = change(sums[4 * group], x), sums[4 * group + 1] = change(sums[4 * group + 1], y);
      sums[4 * group + 2] = change(sums[4 * group + 2], x), sums[4 * group + 3] = change(sums[4 * group + 3], y);
    }
  }

  __device__ __forceinline__ void finish_floats(const Tile &tile, float (&sums)[kShare]) {
    float *const y = static_cast<float *>(results.y[tile.member]);
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = thread_row(tile) + half * 8;
      if (row >= rows()) continue;
      // All that is added to is read before anything is written, which might be the same for all that the compiler
      // knows.
      constexpr int kCount = kShare / 4, kAtOnce = kCount % 8 == 0 ? 8 : kCount % 4 == 0 ? 4 : kCount;
#pragma unroll
      for (int first = 0; first < kShare / 4; first += kAtOnce) {
        float2 old[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) old[i] = old_pair(tile, y, row, first + i);
#pragma unroll
        for (int i = 0; i < kAtOnce; i++) {
          const int at = 4 * (first + i) + 2 * half;
          put_pair(tile, y, row, first + i, {old[i].x + sums[at], old[i].y + sums[at + 1]});
        }
      }
    }
  }
  __device__ float2 old_pair(const Tile &tile, const float *y, int row, int group) {
    const int column = thread_column(tile, group);
    if (kEpilogue == kStoreFloats || column >= shape.member[tile.member].columns) return {0.0f, 0.0f};
    if (kEpilogue == kAccumulate) return *reinterpret_cast<const float2 *>(y + uint64(row) * stride(tile) + column);
    const float *const at = y + uint64(column) * stride(tile) + row;
    return {at[0], at[stride(tile)]};
  }
  __device__ void put_pair(const Tile &tile, float *y, int row, int group, float2 x) {
    const int column = thread_column(tile, group);
    if (column >= shape.member[tile.member].columns) return;
    if (kEpilogue == kAccumulateAcross) {
      float *const at = y + uint64(column) * stride(tile) + row;
      at[0] = x.x, at[stride(tile)] = x.y;
    } else {
      *reinterpret_cast<float2 *>(y + uint64(row) * stride(tile) + column) = x;
    }
  }
};

template <typename T, int kLayout, int kEpilogue, int kTileM, int kTileN, int kStages, int kSplit, bool kHandsOver>
__global__ void __launch_bounds__((kTileM / 64 + 1) * kWarpgroup, 1)
    gemm_wgmma(const __grid_constant__ Maps maps, const __grid_constant__ Results results, const int32 *live,
               const __grid_constant__ Shape shape, int32 beside) {
  using Kernel = Kernel<T, Layout(kLayout), Epilogue(kEpilogue), kTileM, kTileN, kStages, kSplit, kHandsOver>;
  // 1,024 bytes is the period of the swizzle.
  extern __shared__ __align__(1024) uint8 tiles[];
  __shared__ uint64 full[kStages], empty[kStages], handed[Kernel::kMultiplyingWarps], taken[Kernel::kMultiplyingWarps];
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < kStages; stage++) {
      init_barrier(&full[stage], 1);
      init_barrier(&empty[stage], Kernel::kMultiplyingWarps);
    }
    for (int sender = 0; kHandsOver && sender < Kernel::kMultiplyingWarps; sender++) {
      init_barrier(&handed[sender], 1);
      init_barrier(&taken[sender], 1);
    }
    fence_barrier_init();
    prefetch(&maps.a[0]);
    prefetch(&maps.b[0]);
  }
  __syncthreads();
  const PreviousLaunch previous(beside);
  uint8 *const staging = tiles + kStages * Kernel::Operands::kBytes;
  const int rank = kSplit > 1 ? cluster_rank() : 0;
  Kernel kernel{maps, shape, results, {tiles, full, empty}, staging, handed, taken, *live, rank};
  if (threadIdx.x < kWarpgroup) {
    if constexpr (Kernel::kConsumers == 2) give_registers<kHandsOver ? kFetchAndWriteRegisters : kFetchRegisters>();
    if (threadIdx.x == 0) kernel.fetch();
    __syncwarp();
    if constexpr (kHandsOver) {
      if (threadIdx.x >= kWarp) kernel.write_handed();
    }
    // Blocks of a cluster have one tile each, and all their threads take part in its barriers.
    if constexpr (kSplit > 1) {
      if (blockIdx.x / kSplit < kernel.tiles()) share_nothing();
    }
  } else {
    if constexpr (Kernel::kConsumers == 2) take_registers<kHandsOver ? kMultiplyOnlyRegisters : kMultiplyRegisters>();
    kernel.multiply();
  }
}
