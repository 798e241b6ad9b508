// RMS normalisation. A row is a token's (rms_norm), or a head's within it (head_norm).
//
// Each thread keeps its part of the row in registers from the sum to the result, so that memory is read once. A row too
// wide for that is read a second time.
#include "rows.h"

constexpr int kHeld = 2;  // vectors that a thread keeps; DIALECT in rows.py knows this number
constexpr int kLap = kHeld * kVector;

struct Rows {
  uint32 per_token, width;
  float eps;
};

// Who works on a row: a warp where that can hold it, several to a block, else the whole block.
struct Team {
  bool is_warp;
  uint32 row, thread, threads;

  __device__ explicit Team(uint32 width) : is_warp(width <= kWarp * kLap) {
    const uint32 warps = blockDim.x / kWarp;
    row = is_warp ? blockIdx.x * warps + threadIdx.x / kWarp : blockIdx.x;
    thread = is_warp ? threadIdx.x % kWarp : threadIdx.x;
    threads = is_warp ? kWarp : blockDim.x;
  }
  __device__ float sum(float x) const {
    __shared__ float scratch[kWarp];
    return is_warp ? warp_sum(x) : block_sum(x, scratch);
  }
};

// What y is written as once more: for a reader that wants another type.
template <typename T>
struct TwinOf {
  using type = f32;
};
template <>
struct TwinOf<f32> {
  using type = f16;
};

// y = x · rstd ∘ w with rstd = 1/√(mean(x²) + eps).
template <typename T, bool kVectorised, bool kTwin>
__global__ void __launch_bounds__(kMostThreads)
    rms_norm(const T *x, const f32 *w, const int32 *live, T *y, f32 *rstd, typename TwinOf<T>::type *twin,
             const Rows rows, int32 beside) {
  const uint32 width = rows.width;
  const Team team(width);
  const uint32 stride = kVector * team.threads, lap = kHeld * stride;
  const uint64 start = uint64(team.row) * width;
  const PreviousLaunch previous(beside);
  if (team.row >= uint32(*live) * rows.per_token) return;

  Vector held[kHeld];
  float squares = 0.0f;
  for (uint32 first = kVector * team.thread; first < width; first += lap) {
#pragma unroll
    for (int i = 0; i < kHeld; i++) held[i] = load<kVectorised>(x + start, first + i * stride, width);
#pragma unroll
    for (int i = 0; i < kHeld; i++)
#pragma unroll
      for (int k = 0; k < kVector; k++) squares += held[i].of[k] * held[i].of[k];
  }
  const float scale = rsqrtf(team.sum(squares) / float(width) + rows.eps);
  if (team.thread == 0) rstd[team.row] = scale;

  for (uint32 first = kVector * team.thread; first < width; first += lap)
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const uint32 j = first + i * stride;
      Vector result = width <= lap ? held[i] : load<kVectorised>(x + start, j, width);
      const Vector weight = load<kVectorised>(w, j, width);
#pragma unroll
      for (int k = 0; k < kVector; k++) result.of[k] = result.of[k] * scale * weight.of[k];
      store<kVectorised>(y + start, j, width, result);
      if constexpr (kTwin) store<kVectorised>(twin + start, j, width, result);
    }
}

// dx = rstd (g - x̂ mean(g ∘ x̂)) + residual, with x̂ = x · rstd and g = dy ∘ w.
template <typename T, bool kVectorised, bool kResidual>
__global__ void __launch_bounds__(kMostThreads)
    rms_norm_backward(const T *dy, const T *x, const f32 *w, const f32 *rstd, const T *residual, const int32 *live,
                      T *dx, const Rows rows, int32 beside) {
  const uint32 width = rows.width;
  const Team team(width);
  const uint32 stride = kVector * team.threads, lap = kHeld * stride;
  const uint64 start = uint64(team.row) * width;
  const PreviousLaunch previous(beside);
  if (team.row >= uint32(*live) * rows.per_token) return;

  const float scale = rstd[team.row];
  Vector normed[kHeld], g[kHeld];
  auto read_both = [&](Vector &normed, Vector &g, uint32 j) {
    normed = load<kVectorised>(x + start, j, width);
    g = load<kVectorised>(dy + start, j, width);
    const Vector weight = load<kVectorised>(w, j, width);
#pragma unroll
    for (int k = 0; k < kVector; k++) {
      normed.of[k] *= scale;
      g.of[k] *= weight.of[k];
    }
  };

  float products = 0.0f;
  for (uint32 first = kVector * team.thread; first < width; first += lap)
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      read_both(normed[i], g[i], first + i * stride);
#pragma unroll
      for (int k = 0; k < kVector; k++) products += g[i].of[k] * normed[i].of[k];
    }
  const float mean = team.sum(products) / float(width);

  for (uint32 first = kVector * team.thread; first < width; first += lap)
#pragma unroll
    for (int i = 0; i < kHeld; i++) {
      const uint32 j = first + i * stride;
      if (width > lap) read_both(normed[i], g[i], j);
      Vector result = {};
      if constexpr (kResidual) result = load<kVectorised>(residual + start, j, width);
#pragma unroll
      for (int k = 0; k < kVector; k++) result.of[k] += scale * (g[i].of[k] - normed[i].of[k] * mean);
      store<kVectorised>(dx + start, j, width, result);
    }
}
