// SwiGLU and its gradients in a product's epilogue: of sums in registers, or of a tile that was handed over in shared
// memory as 16-bit elements.
#pragma once
#include "rows.h"

// To some ulps of float, which results of 16 bits do not show.
__device__ inline float quick_sigmoid(float x) { return reciprocal(1.0f + power_of_two(x * -kLog2E)); }

// dact = dy W, and what it makes of gate and up: with silu = gate s and s = σ(gate), the derivative of silu is
// s + silu - silu s.
struct SwigluGradient {
  float dgate, dup, act;
  __device__ SwigluGradient(float dact, float gate, float up) {
    const float s = quick_sigmoid(gate), silu = gate * s;
    dgate = dact * up * fmaf(-silu, s, s + silu);
    dup = dact * silu;
    act = silu * up;
  }
};

// Rows of a tile that a warp writes, kPartRows: how many rows and columns lie within the matrix, the first element, and
// elements from a row of any result to the next. In shared memory, a row's sums lie kPitch bytes from those before.
constexpr int kPartRows = 16;
struct Part {
  int rows, columns;
  uint64 first;
  int stride;
};

// Which eight elements are a lane's: a row of kColumns is shared among adjacent lanes, and a warp has kRows at once.
template <int kColumns>
struct Lane {
  static constexpr int kOfRow = kColumns / kVector, kRows = kWarp / kOfRow;
  int row = threadIdx.x % kWarp / kOfRow, column = threadIdx.x % kOfRow * kVector;
  __device__ int rows(const Part &part) const {  // of the part, as far as this lane is concerned
    return column < part.columns ? min_of(part.rows, kPartRows) : 0;
  }
};

// gate and up, half of the columns each, and act = silu(gate) ∘ up of what they were rounded to, as the backward pass
// forms it.
template <int kColumns, int kPitch, typename T>
__device__ __forceinline__ void write_swiglu(const Part &part, const uint8 *sums, T *gate, T *up, T *act) {
  const Lane<kColumns / 2> lane;
#pragma unroll 4
  for (int row = lane.row; row < lane.rows(part); row += lane.kRows) {
    const T *const from = reinterpret_cast<const T *>(sums + row * kPitch) + lane.column;
    const uint64 to = part.first + uint64(row) * part.stride + lane.column;
    const Vector g = read(from), u = read(from + kColumns / 2);
    Vector product;
#pragma unroll
    for (int i = 0; i < kVector; i++) product.of[i] = g.of[i] * quick_sigmoid(g.of[i]) * u.of[i];
    write(gate + to, g);
    write(up + to, u);
    write(act + to, product);
  }
}

// dgate, dup and act of sums that are dact, for which `wait` waits: gate and up are on their way by then.
template <int kColumns, int kPitch, typename T, typename Wait>
__device__ __forceinline__ void write_swiglu_backward(const Part &part, const uint8 *sums, const T *gate, const T *up,
                                                      T *dgate, T *dup, T *act, Wait wait) {
  const Lane<kColumns> lane;
  constexpr int kCount = kPartRows / lane.kRows;  // of a lane's vectors
  const auto row_of = [&](int i) { return lane.row + i * lane.kRows; };
  const auto place = [&](int i) { return part.first + uint64(row_of(i)) * part.stride + lane.column; };
  uint4 gates[kCount], ups[kCount];
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    if (row_of(i) >= lane.rows(part)) continue;
    gates[i] = *reinterpret_cast<const uint4 *>(gate + place(i));
    ups[i] = *reinterpret_cast<const uint4 *>(up + place(i));
  }
  wait();
#pragma unroll
  for (int i = 0; i < kCount; i++) {
    if (row_of(i) >= lane.rows(part)) continue;
    const Vector dact = read(reinterpret_cast<const T *>(sums + row_of(i) * kPitch) + lane.column);
    const Vector g = read(reinterpret_cast<const T *>(&gates[i])), u = read(reinterpret_cast<const T *>(&ups[i]));
    Vector results[3];
#pragma unroll
    for (int j = 0; j < kVector; j++) {
      const SwigluGradient x(dact.of[j], g.of[j], u.of[j]);
      results[0].of[j] = x.dgate, results[1].of[j] = x.dup, results[2].of[j] = x.act;
    }
    write(dgate + place(i), results[0]);
    write(dup + place(i), results[1]);
    write(act + place(i), results[2]);
  }
}
