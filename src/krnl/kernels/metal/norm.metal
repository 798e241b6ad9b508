// RMS normalisation, a threadgroup to a row. A row is a token's (rms_norm), or a head's within it (head_norm).
//
// Each thread keeps its part of the row in registers from the sum to the result, so that memory is read once. A row too
// wide for that is read a second time.
#include "rows.h"

constant bool has_twin [[function_constant(1)]];
constant bool has_residual [[function_constant(2)]];

constant constexpr uint kHeld = 4;  // vectors of four that a thread keeps; rows.py knows this number

struct Rows {
  uint per_token, width;
  float eps;
};

// y = x · rstd ∘ w with rstd = 1/√(mean(x²) + eps). The twin is y in the other type, for a reader that wants that one.
template <typename T, typename Twin>
kernel void rms_norm(device const T *x [[buffer(0)]], device const float *w [[buffer(1)]],
                     device const int *live [[buffer(2)]], device T *y [[buffer(3)]], device float *rstd [[buffer(4)]],
                     device Twin *twin [[buffer(5), function_constant(has_twin)]],
                     constant Rows &rows [[buffer(6)]], uint row [[threadgroup_position_in_grid]],
                     uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[kSimdgroups];
  if (row >= uint(*live) * rows.per_token) return;
  const uint width = rows.width, stride = 4 * threads, lap = kHeld * stride;
  const ulong start = ulong(row) * width;
  float4 held[kHeld];

  float4 squares = float4(0.0f);
  for (uint first = 4 * thread_index; first < width; first += lap)
    for (uint i = 0; i < kHeld; i++) {
      held[i] = load4(x + start, first + i * stride, width);
      squares += held[i] * held[i];
    }
  const float sum = threadgroup_sum(squares.x + squares.y + squares.z + squares.w, scratch, thread_index, threads);
  const float scale = precise::rsqrt(sum / float(width) + rows.eps);
  if (thread_index == 0) rstd[row] = scale;

  for (uint first = 4 * thread_index; first < width; first += lap)
    for (uint i = 0; i < kHeld; i++) {
      const uint j = first + i * stride;
      const float4 values = width <= lap ? held[i] : load4(x + start, j, width);
      const float4 result = values * scale * load4(w, j, width);
      store4(y + start, j, width, result);
      if (has_twin) store4(twin + start, j, width, result);
    }
}

template [[host_name("rms_norm_f16")]] kernel void rms_norm<half, float>(
    device const half *, device const float *, device const int *, device half *, device float *, device float *,
    constant Rows &, uint, uint, uint);
template [[host_name("rms_norm_f32")]] kernel void rms_norm<float, half>(
    device const float *, device const float *, device const int *, device float *, device float *, device half *,
    constant Rows &, uint, uint, uint);

// dx = rstd (g - x̂ mean(g ∘ x̂)) + residual, with x̂ = x · rstd and g = dy ∘ w.
template <typename T>
kernel void rms_norm_backward(device const T *dy [[buffer(0)]], device const T *x [[buffer(1)]],
                              device const float *w [[buffer(2)]], device const float *rstd [[buffer(3)]],
                              device const T *residual [[buffer(4), function_constant(has_residual)]],
                              device const int *live [[buffer(5)]], device T *dx [[buffer(6)]],
                              constant Rows &rows [[buffer(7)]], uint row [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]],
                              uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[kSimdgroups];
  if (row >= uint(*live) * rows.per_token) return;
  const uint width = rows.width, stride = 4 * threads, lap = kHeld * stride;
  const ulong start = ulong(row) * width;
  const float scale = rstd[row];
  float4 normed[kHeld], g[kHeld];

  float4 products = float4(0.0f);
  for (uint first = 4 * thread_index; first < width; first += lap)
    for (uint i = 0; i < kHeld; i++) {
      const uint j = first + i * stride;
      normed[i] = load4(x + start, j, width) * scale;
      g[i] = load4(dy + start, j, width) * load4(w, j, width);
      products += g[i] * normed[i];
    }
  const float sum = threadgroup_sum(products.x + products.y + products.z + products.w, scratch, thread_index, threads);
  const float mean = sum / float(width);

  for (uint first = 4 * thread_index; first < width; first += lap)
    for (uint i = 0; i < kHeld; i++) {
      const uint j = first + i * stride;
      if (width > lap) {
        normed[i] = load4(x + start, j, width) * scale;
        g[i] = load4(dy + start, j, width) * load4(w, j, width);
      }
      float4 result = scale * (g[i] - normed[i] * mean);
      if (has_residual) result += load4(residual + start, j, width);
      store4(dx + start, j, width, result);
    }
}

template [[host_name("rms_norm_backward_f16")]] kernel void rms_norm_backward<half>(
    device const half *, device const half *, device const float *, device const float *, device const half *,
    device const int *, device half *, constant Rows &, uint, uint, uint);
template [[host_name("rms_norm_backward_f32")]] kernel void rms_norm_backward<float>(
    device const float *, device const float *, device const float *, device const float *, device const float *,
    device const int *, device float *, constant Rows &, uint, uint, uint);
