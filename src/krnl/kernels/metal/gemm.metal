// The matrix products of LoRA layers (ops/gemm.py): sums of products, and what becomes of each element of the sum.
// gemm.py says how they are launched.
#include "gemm.h"

constant bool aligned [[function_constant(0)]];          // see gemm.h; all but the adapter's pair
constant uint pairs [[function_constant(1)]];           // 1 to 3, the adapter's not counted
constant bool has_adapter [[function_constant(2)]];      // the K loop runs on over the adapter's pair
constant bool adapter_aligned [[function_constant(3)]];
constant bool to_floats [[function_constant(4)]];        // the output is made of floats, whatever the activations are
constant bool has_scale [[function_constant(5)]];
constant bool has_bias [[function_constant(6)]];
constant bool has_residual [[function_constant(7)]];
constant bool accumulates [[function_constant(8)]];      // gradients: a sum over the live rows is added to floats
constant bool is_dact [[function_constant(9)]];          // the sum is the gradient at SwiGLU's result
constant bool to_activations = !to_floats;
constant bool has_second = pairs > 1;
constant bool has_third = pairs > 2;

enum { NN, NT, TN };

struct Pair {
  uint depth, a_stride, b_stride;
};

struct Shape {
  uint rows, columns;
  uint stride;  // of the output, and of what is read or written beside it
  uint chunks;  // into which the K loop is cut, along grid.z
  Pair pair[3];
  Pair adapter;
};

template <typename T>
struct Linear {
  device T *y;
  device float *floats;
  device const float *scale, *bias;
  device const T *residual, *gate, *up;
  device T *dgate, *dup;
  uint stride;
};

// y = sum · scale + bias + residual, or y += sum. With SwiGLU behind the product: dgate, dup, and act for y.
template <typename T>
METAL_FUNC void finish(thread const Linear<T> &linear, uint row, uint column, float value) {
  const ulong at = ulong(row) * linear.stride + column;
  if (is_dact) {
    const float gate = float(linear.gate[at]), up = float(linear.up[at]);
    float rest;
    const float s = sigmoid(gate, rest), silu = gate * s;
    linear.dgate[at] = T(value * up * (s + silu * rest));
    linear.dup[at] = T(value * silu);
    linear.y[at] = T(silu * up);
    return;
  }
  if (has_scale) value *= linear.scale[column];
  if (has_bias) value += linear.bias[column];
  if (has_residual) value += float(linear.residual[at]);
  if (accumulates) value += linear.floats[at];
  if (to_floats) linear.floats[at] = value;
  else linear.y[at] = T(value);
}

// What an epilogue is given. What a specialisation does not have is not copied into it.
#define LINEAR_PARAMETERS(T)                                                 \
  device T *y [[buffer(8), function_constant(to_activations)]],              \
  device float *floats [[buffer(9), function_constant(to_floats)]],          \
  device const float *scale [[buffer(10), function_constant(has_scale)]],    \
  device const float *bias [[buffer(11), function_constant(has_bias)]],      \
  device const T *residual [[buffer(12), function_constant(has_residual)]],  \
  device const T *gate [[buffer(13), function_constant(is_dact)]],           \
  device const T *up [[buffer(14), function_constant(is_dact)]],             \
  device T *dgate [[buffer(15), function_constant(is_dact)]],                \
  device T *dup [[buffer(16), function_constant(is_dact)]]

#define LINEAR_TYPES(T)                                                                                          \
  device T *, device float *, device const float *, device const float *, device const T *, device const T *,    \
  device const T *, device T *, device T *

#define LINEAR(T, linear)                         \
  Linear<T> linear;                               \
  linear.stride = shape.stride;                   \
  if (to_activations) linear.y = y;               \
  if (to_floats) linear.floats = floats;          \
  if (has_scale) linear.scale = scale;            \
  if (has_bias) linear.bias = bias;               \
  if (has_residual) linear.residual = residual;   \
  if (is_dact) {                                  \
    linear.gate = gate;                           \
    linear.up = up;                               \
    linear.dgate = dgate;                         \
    linear.dup = dup;                             \
  }

METAL_FUNC uint steps(uint depth) { return (depth + TILE - 1) / TILE; }

// sum += a b over those of this pair's steps of 32 that lie from `step` on and before `last`.
template <int layout, typename T, typename S>
METAL_FUNC void multiply(thread Tile<float> &sum, device const T *a, device const S *b, constant Pair &pair, uint depth,
                         int step, int last, uint row, uint column, uint rows, uint columns, bool is_aligned,
                         threadgroup T *stage, uint lane) {
  const uint k = min(uint(max(step, 0)) * TILE, depth), end = min(uint(max(last, 0)) * TILE, depth);
  const ulong a_row = layout == TN ? 1 : pair.a_stride, a_k = layout == TN ? pair.a_stride : 1;
  const ulong b_column = layout == NT ? pair.b_stride : 1, b_k = layout == NT ? 1 : pair.b_stride;
  a += row * a_row + k * a_k;
  b += column * b_column + k * b_k;
  depth = end - k;
  if (layout == NN) multiply_nn(sum, a, pair.a_stride, b, pair.b_stride, rows, columns, depth, is_aligned, lane);
  if (layout == TN) multiply_tn(sum, a, pair.a_stride, b, pair.b_stride, rows, columns, depth, is_aligned, lane);
  if (layout == NT) multiply_nt(sum, a, pair.a_stride, b, pair.b_stride, rows, columns, depth, is_aligned, stage, lane);
}

// grid.x and y are the output's tiles of columns and rows. Where these are too few for the GPU, grid.z cuts the K loop
// into chunks of whole steps, the last one ragged, whose sums are left as floats for gemm_reduce.
template <int layout, typename T, typename W>
kernel void gemm(device const T *a0 [[buffer(0)]], device const W *b0 [[buffer(1)]],
                 device const T *a1 [[buffer(2), function_constant(has_second)]],
                 device const W *b1 [[buffer(3), function_constant(has_second)]],
                 device const T *a2 [[buffer(4), function_constant(has_third)]],
                 device const W *b2 [[buffer(5), function_constant(has_third)]],
                 device const T *adapter_a [[buffer(6), function_constant(has_adapter)]],
                 device const T *adapter_b [[buffer(7), function_constant(has_adapter)]],
                 LINEAR_PARAMETERS(T),
                 device const int *live [[buffer(17)]], constant Shape &shape [[buffer(18)]],
                 uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  constexpr uint staged = layout == NT ? TILE * TILE : 1;
  threadgroup T stage[staged];
  const uint row = group.y * TILE, column = group.x * TILE, live_rows = uint(live[0]);
  const uint rows = remaining(layout == TN ? shape.rows : min(shape.rows, live_rows), row);
  const uint columns = shape.columns - column;
  if (rows == 0) return;

  uint all_steps = has_adapter ? steps(shape.adapter.depth) : 0;
  for (uint i = 0; i < pairs; i++) all_steps += steps(layout == TN ? live_rows : shape.pair[i].depth);
  const int chunk_steps = int((all_steps + shape.chunks - 1) / shape.chunks);
  int step = int(group.z) * chunk_steps;  // this chunk's first, counted from the pair's first

  Tile<float> sum;
  clear(sum);
  for (uint i = 0; i < pairs; i++) {
    const uint depth = layout == TN ? live_rows : shape.pair[i].depth;
    device const T *a = a0;
    device const W *b = b0;
    if (has_second && i == 1) {
      a = a1;
      b = b1;
    }
    if (has_third && i == 2) {
      a = a2;
      b = b2;
    }
    multiply<layout>(sum, a, b, shape.pair[i], depth, step, step + chunk_steps, row, column, rows, columns, aligned,
                     stage, lane);
    step -= int(steps(depth));
  }
  if (has_adapter)
    multiply<layout>(sum, adapter_a, adapter_b, shape.adapter, shape.adapter.depth, step, step + chunk_steps, row,
                     column, rows, columns, adapter_aligned, stage, lane);

  LINEAR(T, linear)
  if (shape.chunks > 1) linear.floats += ulong(group.z) * shape.rows * shape.columns;
  store(sum, linear, row, column, rows, columns, lane);
}

// One thread for each element of the output: adds up its chunks in their order.
template <typename T>
kernel void gemm_reduce(device const float *partials [[buffer(0)]], LINEAR_PARAMETERS(T),
                        device const int *live [[buffer(17)]], constant Shape &shape [[buffer(18)]],
                        uint index [[thread_position_in_grid]]) {
  const uint row = index / shape.columns, column = index % shape.columns, size = shape.rows * shape.columns;
  if (row >= (accumulates ? shape.rows : min(shape.rows, uint(live[0])))) return;
  float sum = 0.0f;
  for (uint chunk = 0; chunk < shape.chunks; chunk++) sum += partials[chunk * size + index];
  LINEAR(T, linear)
  finish(linear, row, column, sum);
}

// ---- gate and up in one product, and SwiGLU ----

struct SwigluShape {
  uint rows, columns, depth;
  uint gate_rank, up_rank;
};

template <typename T>
struct Swiglu {
  device T *gate, *up, *act;
  uint stride;
};

template <typename T>
METAL_FUNC void finish(thread const Swiglu<T> &swiglu, uint row, uint column, float gate, float up) {
  const ulong at = ulong(row) * swiglu.stride + column;
  swiglu.gate[at] = T(gate);
  swiglu.up[at] = T(up);
  float rest;
  swiglu.act[at] = T(gate * sigmoid(gate, rest) * up);
}

template <typename T>
METAL_FUNC void store_both(thread Matrix<float> &gate, thread Matrix<float> &up, thread const Swiglu<T> &swiglu,
                           uint row, uint column, uint rows, uint columns, uint lane) {
  const uint i = lane_row(lane), j = lane_column(lane);
  if (i < rows && j < columns)
    finish(swiglu, row + i, column + j, gate.thread_elements()[0], up.thread_elements()[0]);
  if (i < rows && j + 1 < columns)
    finish(swiglu, row + i, column + j + 1, gate.thread_elements()[1], up.thread_elements()[1]);
}

template <typename T>
METAL_FUNC void store_both(thread Strip<float> &strip, thread const Swiglu<T> &swiglu, uint row, uint column, uint rows,
                           uint columns, uint lane) {
  store_both(strip.m0, strip.m2, swiglu, row, column, rows, columns, lane);
  store_both(strip.m1, strip.m3, swiglu, row, column + 8, rows, remaining(columns, 8), lane);
}

// Sixteen accumulators are all there are, so a tile is 32 rows of sixteen columns of gate, and beside them the same
// columns of up: as much arithmetic for every element read as any other tile, one pass over x, and both values of an
// element in one lane. The adapters stand in blocks on a diagonal: gate's k come first, up's follow.
template <typename T, typename W>
kernel void gemm_swiglu(device const T *x [[buffer(0)]], device const W *w_gate [[buffer(1)]],
                        device const W *w_up [[buffer(2)]],
                        device const T *u [[buffer(3), function_constant(has_adapter)]],
                        device const T *b_gate [[buffer(4), function_constant(has_adapter)]],
                        device const T *b_up [[buffer(5), function_constant(has_adapter)]],
                        device T *gate [[buffer(6)]], device T *up [[buffer(7)]], device T *act [[buffer(8)]],
                        device const int *live [[buffer(9)]], constant SwigluShape &shape [[buffer(10)]],
                        uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_simdgroup]]) {
  threadgroup T stage[TILE * TILE];
  const uint row = group.y * TILE, column = group.x * (TILE / 2);
  const uint rows = remaining(min(shape.rows, uint(live[0])), row), columns = shape.columns - column;
  if (rows == 0) return;
  const bool is_up = lane >= TILE / 2, exists = lane % (TILE / 2) < columns;
  const ulong own = column + lane % (TILE / 2);

  Tile<float> sum;
  clear(sum);
  multiply_columns(sum, x + ulong(row) * shape.depth, shape.depth, (is_up ? w_up : w_gate) + own * shape.depth, 0,
                   exists ? shape.depth : 0, rows, shape.depth, rows >= TILE && columns >= TILE / 2, aligned, stage,
                   lane);
  if (has_adapter) {
    const uint rank = shape.gate_rank + shape.up_rank;
    device const T *b = is_up ? b_up + own * shape.up_rank : b_gate + own * shape.gate_rank;
    const uint first = is_up ? shape.gate_rank : 0, last = is_up ? rank : shape.gate_rank;
    multiply_columns(sum, u + ulong(row) * rank, rank, b, first, exists ? last : 0, rows, rank, false, adapter_aligned,
                     stage, lane);
  }

  const Swiglu<T> swiglu = {gate, up, act, shape.columns};
  store_both(sum.r0, swiglu, row, column, rows, columns, lane);
  store_both(sum.r1, swiglu, row + 8, column, remaining(rows, 8), columns, lane);
  store_both(sum.r2, swiglu, row + 16, column, remaining(rows, 16), columns, lane);
  store_both(sum.r3, swiglu, row + 24, column, remaining(rows, 24), columns, lane);
}

#define GEMM(name, layout, T, W)                                                                                    \
  template [[host_name("gemm_" name)]] kernel void gemm<layout, T, W>(                                              \
      device const T *, device const W *, device const T *, device const W *, device const T *, device const W *,   \
      device const T *, device const T *, LINEAR_TYPES(T), device const int *, constant Shape &, uint3, uint);

#define REDUCE(name, T)                                                            \
  template [[host_name("gemm_reduce_" name)]] kernel void gemm_reduce<T>(          \
      device const float *, LINEAR_TYPES(T), device const int *, constant Shape &, uint);

#define SWIGLU(name, T, W)                                                                                          \
  template [[host_name("gemm_swiglu_" name)]] kernel void gemm_swiglu<T, W>(                                        \
      device const T *, device const W *, device const W *, device const T *, device const T *, device const T *,   \
      device T *, device T *, device T *, device const int *, constant SwigluShape &, uint3, uint);

#define FOR_WEIGHTS(name, T, W)       \
  GEMM("nn_" name, NN, T, W)          \
  GEMM("nt_" name, NT, T, W)          \
  SWIGLU(name, T, W)

#define FOR_ACTIVATIONS(name, T)      \
  FOR_WEIGHTS(name "_f16", T, half)   \
  FOR_WEIGHTS(name "_bf16", T, ushort)\
  FOR_WEIGHTS(name "_f32", T, float)  \
  GEMM("tn_" name, TN, T, T)          \
  REDUCE(name, T)

FOR_ACTIVATIONS("f16", half)
FOR_ACTIVATIONS("f32", float)
