// Rows read and written eight elements at a time, for kernels whose threads own eight adjacent elements each.
//
// Kernels that are made for kVectorised rows know that every row begins at, and has, a multiple of eight elements: the
// host looks at widths and offsets. Other rows are read and written one element at a time.
#pragma once
#include "common.h"

// rows.py knows these numbers.
constexpr int kVector = 8;
constexpr int kMostThreads = 1024;      // to a row that is summed
constexpr int kPointwiseThreads = 256;  // of element-wise work

struct Vector {
  float of[kVector];
};

// Eight elements in accesses of sixteen bytes.
__device__ inline Vector read(const f32 *from) {
  const float4 low = reinterpret_cast<const float4 *>(from)[0], high = reinterpret_cast<const float4 *>(from)[1];
  return {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
}
template <typename T>
__device__ inline Vector read(const T *from) {
  const uint4 bits = *reinterpret_cast<const uint4 *>(from);
  const float2 a = unpack<T>(bits.x), b = unpack<T>(bits.y), c = unpack<T>(bits.z), d = unpack<T>(bits.w);
  return {a.x, a.y, b.x, b.y, c.x, c.y, d.x, d.y};
}
__device__ inline void write(f32 *to, const Vector &x) {
  reinterpret_cast<float4 *>(to)[0] = {x.of[0], x.of[1], x.of[2], x.of[3]};
  reinterpret_cast<float4 *>(to)[1] = {x.of[4], x.of[5], x.of[6], x.of[7]};
}
template <typename T>
__device__ inline void write(T *to, const Vector &x) {
  *reinterpret_cast<uint4 *>(to) = {pack<T>(x.of[0], x.of[1]), pack<T>(x.of[2], x.of[3]), pack<T>(x.of[4], x.of[5]),
                                    pack<T>(x.of[6], x.of[7])};
}

// Elements j to j + 7 of a row, `fill` beyond its width.
template <bool kVectorised, typename T>
__device__ inline Vector load(const T *row, uint32 j, uint32 width, float fill = 0.0f) {
  if (kVectorised && j < width) return read(row + j);
  Vector x;
#pragma unroll
  for (int i = 0; i < kVector; i++) x.of[i] = !kVectorised && j < width && i < width - j ? to_float(row[j + i]) : fill;
  return x;
}

// Writes what of them lies within the width, rounded.
template <bool kVectorised, typename T>
__device__ inline void store(T *row, uint32 j, uint32 width, const Vector &x) {
  if (j >= width) return;
  if constexpr (kVectorised) {
    write(row + j, x);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; i++)
      if (i < width - j) row[j + i] = from_float<T>(x.of[i]);
  }
}

// The first element of this thread's eight, in element-wise work on a row.
__device__ inline uint64 first_element() { return (uint64(blockIdx.x) * blockDim.x + threadIdx.x) * kVector; }
