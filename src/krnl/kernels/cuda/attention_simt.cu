// Attention of any element type, head size and alignment: what the tensor cores' kernels do not take, and the few
// queries of generation.
//
// A block has one row: of queries in the forward pass and for dQ, of keys and values for dK and dV. Its kWarps warps
// take runs of 32 rows of the other side in turn, and add up what they have at the end. A lane holds kPerLane
// neighbouring columns of a row, and once the dot products with a run are done, what belongs to one row of the run.
#include "attention.h"

constexpr int kResident = 12;  // warps on a multiprocessor, at least: with more, registers would be spilled

template <typename T, int kCount>
struct alignas(min_of(kCount * int(sizeof(T)), 16)) Vector {
  T at[kCount];
};

template <int kPerLane>
constexpr int kWidth = kPerLane * kWarp;

// This lane's columns of a row, zeros beyond its end. With kAligned they are all there or none, and lie at a multiple
// of their size.
template <int kPerLane, bool kAligned, typename T>
__device__ inline void load(float (&x)[kPerLane], const T *row, int size) {
  const int column = threadIdx.x % kWarp * kPerLane;
  if (kAligned) {
    Vector<T, kPerLane> vector = {};
    if (column < size) vector = *reinterpret_cast<const Vector<T, kPerLane> *>(row + column);
#pragma unroll
    for (int i = 0; i < kPerLane; i++) x[i] = to_float(vector.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < kPerLane; i++) x[i] = column + i < size ? to_float(row[column + i]) : 0.0f;
  }
}

template <int kPerLane>
__device__ inline float dot(const float (&x)[kPerLane], const float (&y)[kPerLane]) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) sum = fmaf(x[i], y[i], sum);
  return warp_sum(sum);
}

template <int kPerLane>
__device__ inline void add(float (&sums)[kPerLane], float factor, const float (&x)[kPerLane]) {
#pragma unroll
  for (int i = 0; i < kPerLane; i++) sums[i] = fmaf(factor, x[i], sums[i]);
}

// Writes the sum of all warps' sums, each times its factor.
template <int kPerLane, int kWarps, typename T>
__device__ inline void store(T *row, int size, const float (&sums)[kPerLane], float factor,
                             float (&scratch)[kWarps][kWidth<kPerLane>]) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
#pragma unroll
  for (int i = 0; i < kPerLane; i++) scratch[warp][lane * kPerLane + i] = sums[i] * factor;
  __syncthreads();
  for (int column = threadIdx.x; column < size; column += kWarps * kWarp) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kWarps; i++) sum += scratch[i][column];
    row[column] = from_float<T>(sum);
  }
  __syncthreads();
}

// o and lse of a query.
template <typename T, int kPerLane, bool kAligned, int kWarps>
__global__ void __launch_bounds__(kWarps * kWarp, max_of(kResident / kWarps, 1))
    attention_forward(const T *q, const T *k, const T *v, const int32 *start, const int32 *stop, const int32 *live,
                      T *o, float *lse, Shape shape, int32 beside) {
  __shared__ float scratch[kWarps][kWidth<kPerLane>], tops[kWarps], totals[kWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int head = blockIdx.x % shape.heads, key_head = head / (shape.heads / shape.key_heads);
  const int query = shape.blocks - 1 - int(blockIdx.x) / shape.heads;
  const uint64 at = uint64(query) * shape.heads + head, key_stride = shape.key_heads * shape.size;
  k += key_head * shape.size;
  v += key_head * shape.size;
  const PreviousLaunch previous(beside);
  if (query >= *live) return;

  const float scale = shape.scale * kLog2E;
  float query_row[kPerLane], out[kPerLane] = {}, top = -infinity(), total = 0.0f;
  load<kPerLane, kAligned>(query_row, q + at * shape.size, shape.size);
  const int last = stop[query];
  for (int key = start[query] + warp * kWarp; key < last; key += kWarps * kWarp) {
    const int count = min_of(last - key, kWarp);
    float score = -infinity();
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      float key_row[kPerLane];
      load<kPerLane, kAligned>(key_row, k + (key + i) * key_stride, shape.size);
      const float product = dot(query_row, key_row);
      if (lane == i) score = product * scale;
    }
    const float new_top = fmaxf(top, warp_max(score)), factor = exp2f(top - new_top);
    const float p = lane < count ? exp2f(score - new_top) : 0.0f;
    top = new_top;
    total = total * factor + p;
#pragma unroll
    for (int i = 0; i < kPerLane; i++) out[i] *= factor;
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      float value_row[kPerLane];
      load<kPerLane, kAligned>(value_row, v + (key + i) * key_stride, shape.size);
      add(out, __shfl_sync(~0u, p, i), value_row);
    }
  }

  total = warp_sum(total);
  if (lane == 0) tops[warp] = top, totals[warp] = total;
  __syncthreads();
  float row_top = tops[0], row_total = 0.0f;
#pragma unroll
  for (int i = 1; i < kWarps; i++) row_top = fmaxf(row_top, tops[i]);
#pragma unroll
  for (int i = 0; i < kWarps; i++) row_total += totals[i] * exp2f(tops[i] - row_top);
  store(o + at * shape.size, shape.size, out, exp2f(top - row_top) / row_total, scratch);
  if (threadIdx.x == 0) lse[at] = row_top / kLog2E + logf(row_total);
}

// dq of a query, and delta = rowsum(dO ∘ O), which equals rowsum(P ∘ dP).
template <typename T, int kPerLane, bool kAligned, int kWarps>
__global__ void __launch_bounds__(kWarps * kWarp, max_of(kResident / kWarps, 1))
    attention_query_gradients(const T *d_out, const T *q, const T *k, const T *v, const T *o, const float *lse,
                              const int32 *start, const int32 *live, T *dq, float *delta, Shape shape, int32 beside) {
  __shared__ float scratch[kWarps][kWidth<kPerLane>];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int head = blockIdx.x % shape.heads, key_head = head / (shape.heads / shape.key_heads);
  const int query = shape.blocks - 1 - int(blockIdx.x) / shape.heads;
  const uint64 at = uint64(query) * shape.heads + head, key_stride = shape.key_heads * shape.size;
  k += key_head * shape.size;
  v += key_head * shape.size;
  const PreviousLaunch previous(beside);
  if (query >= *live) return;

  float query_row[kPerLane], d_out_row[kPerLane], out_row[kPerLane], sums[kPerLane] = {};
  load<kPerLane, kAligned>(query_row, q + at * shape.size, shape.size);
  load<kPerLane, kAligned>(d_out_row, d_out + at * shape.size, shape.size);
  load<kPerLane, kAligned>(out_row, o + at * shape.size, shape.size);
  const float row_delta = dot(d_out_row, out_row), row_lse = lse[at] * kLog2E, scale = shape.scale * kLog2E;
  for (int key = start[query] + warp * kWarp; key <= query; key += kWarps * kWarp) {
    const int count = min_of(query + 1 - key, kWarp);
    float ds = 0.0f;
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      float key_row[kPerLane], value_row[kPerLane];
      load<kPerLane, kAligned>(key_row, k + (key + i) * key_stride, shape.size);
      load<kPerLane, kAligned>(value_row, v + (key + i) * key_stride, shape.size);
      const float score = dot(query_row, key_row), dp = dot(d_out_row, value_row);
      if (lane == i) ds = exp2f(score * scale - row_lse) * (dp - row_delta) * shape.scale;
    }
#pragma unroll 4
    for (int i = 0; i < count; i++) {
      float key_row[kPerLane];
      load<kPerLane, kAligned>(key_row, k + (key + i) * key_stride, shape.size);
      add(sums, __shfl_sync(~0u, ds, i), key_row);
    }
  }
  store(dq + at * shape.size, shape.size, sums, 1.0f, scratch);
  if (threadIdx.x == 0) delta[at] = row_delta;
}

// dk and dv of a key: sums over the query heads that read it and the queries that see it.
template <typename T, int kPerLane, bool kAligned, int kWarps>
__global__ void __launch_bounds__(kWarps * kWarp, max_of(kResident / kWarps, 1))
    attention_key_gradients(const T *d_out, const T *q, const T *k, const T *v, const float *lse, const float *delta,
                            const int32 *start, const int32 *live, T *dk, T *dv, Shape shape, int32 beside) {
  __shared__ float scratch[kWarps][kWidth<kPerLane>];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int key_head = blockIdx.x % shape.key_heads, key = blockIdx.x / shape.key_heads;
  const int group = shape.heads / shape.key_heads;
  const uint64 key_at = (uint64(key) * shape.key_heads + key_head) * shape.size;
  const PreviousLaunch previous(beside);
  const int queries = *live;
  if (key >= queries) return;

  float key_row[kPerLane], value_row[kPerLane], key_sums[kPerLane] = {}, value_sums[kPerLane] = {};
  load<kPerLane, kAligned>(key_row, k + key_at, shape.size);
  load<kPerLane, kAligned>(value_row, v + key_at, shape.size);
  const float scale = shape.scale * kLog2E;
  const int stop = first_past(start, key, key, queries);
  for (int head = key_head * group; head < (key_head + 1) * group; head++) {
    for (int query = key + warp * kWarp; query < stop; query += kWarps * kWarp) {
      const int count = min_of(stop - query, kWarp);
      float p = 0.0f, ds = 0.0f;
#pragma unroll 4
      for (int i = 0; i < count; i++) {
        const uint64 at = uint64(query + i) * shape.heads + head;
        float query_row[kPerLane], d_out_row[kPerLane];
        load<kPerLane, kAligned>(query_row, q + at * shape.size, shape.size);
        load<kPerLane, kAligned>(d_out_row, d_out + at * shape.size, shape.size);
        const float score = dot(query_row, key_row), dp = dot(d_out_row, value_row);
        if (lane == i) {
          p = exp2f(score * scale - lse[at] * kLog2E);
          ds = p * (dp - delta[at]) * shape.scale;
        }
      }
#pragma unroll 4
      for (int i = 0; i < count; i++) {
        const uint64 at = uint64(query + i) * shape.heads + head;
        float query_row[kPerLane], d_out_row[kPerLane];
        load<kPerLane, kAligned>(query_row, q + at * shape.size, shape.size);
        load<kPerLane, kAligned>(d_out_row, d_out + at * shape.size, shape.size);
        add(value_sums, __shfl_sync(~0u, p, i), d_out_row);
        add(key_sums, __shfl_sync(~0u, ds, i), query_row);
      }
    }
  }
  store(dk + key_at, shape.size, key_sums, 1.0f, scratch);
  store(dv + key_at, shape.size, value_sums, 1.0f, scratch);
}
