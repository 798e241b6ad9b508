// Cross-entropy over rows of logits, a threadgroup to a row.
#include "rows.h"

constant bool has_gradient [[function_constant(1)]];

// losses[row] = log Σ exp(logits) - logits[target]. With a gradient, logits become loss_scale · (softmax - one-hot).
//
// The first reading finds the largest logit and the sum of exponentials together: a thread scales its sum down whenever
// its maximum rises.
template <typename T>
kernel void cross_entropy(device const int *target [[buffer(0)]],
                          device const float *loss_scale [[buffer(1), function_constant(has_gradient)]],
                          device const int *live [[buffer(2)]], device T *logits [[buffer(3)]],
                          device float *losses [[buffer(4)]], constant uint &classes [[buffer(5)]],
                          uint row [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]],
                          uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[kSimdgroups];
  if (row >= uint(*live)) return;
  device T *x = logits + ulong(row) * classes;
  const uint label = uint(target[row]);

  float top = -FLT_MAX, sum = 0.0f, at_label = 0.0f;
  for (uint j = 4 * thread_index; j < classes; j += 4 * threads) {
    float4 values = load4(x, j, classes);
    for (uint i = 1; i < 4; i++)
      if (!vectorised && j + i >= classes) values[i] = -FLT_MAX;
    const float previous = top;
    top = max(top, max(max(values.x, values.y), max(values.z, values.w)));
    const float4 terms = precise::exp(values - top);
    sum = sum * precise::exp(previous - top) + (terms.x + terms.y + terms.z + terms.w);
    if (label - j < 4) at_label = values[label - j];
  }
  const float highest = threadgroup_max(top, scratch, thread_index, threads);
  const float total = threadgroup_sum(sum * precise::exp(top - highest), scratch, thread_index, threads);
  if (label / 4 % threads == thread_index) losses[row] = highest - at_label + precise::log(total);
  if (!has_gradient) return;

  const float scale = *loss_scale / total;
  for (uint j = 4 * thread_index; j < classes; j += 4 * threads) {
    float4 gradient = precise::exp(load4(x, j, classes) - highest) * scale;
    if (label - j < 4) gradient[label - j] -= *loss_scale;
    store4(x, j, classes, gradient);
  }
}

template [[host_name("cross_entropy_f16")]] kernel void cross_entropy<half>(
    device const int *, device const float *, device const int *, device half *, device float *, constant uint &, uint,
    uint, uint);
template [[host_name("cross_entropy_f32")]] kernel void cross_entropy<float>(
    device const int *, device const float *, device const int *, device float *, device float *, constant uint &, uint,
    uint, uint);

// Adds the live rows' losses, always in the same order, to the loss that is there. One threadgroup.
kernel void sum_losses(device const float *losses [[buffer(0)]], device const int *live [[buffer(1)]],
                       device float *loss [[buffer(2)]], uint thread_index [[thread_index_in_threadgroup]],
                       uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[kSimdgroups];
  float sum = 0.0f;
  for (uint row = thread_index; row < uint(*live); row += threads) sum += losses[row];
  sum = threadgroup_sum(sum, scratch, thread_index, threads);
  if (thread_index == 0) *loss += sum;
}
