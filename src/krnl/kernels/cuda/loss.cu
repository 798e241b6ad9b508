// Cross-entropy over rows of logits, a block to a row.
#include "rows.h"

// losses[row] = log Σ exp(logits) - logits[target]. With a gradient, logits become loss_scale · (softmax - one-hot).
//
// The first reading finds the largest logit and the sum of exponentials together: a thread scales its sum down whenever
// its maximum rises.
template <typename T, bool kVectorised, bool kGradient>
__global__ void __launch_bounds__(kMostThreads)
    cross_entropy(const int32 *target, const f32 *loss_scale, const int32 *live, T *logits, f32 *losses,
                  const uint32 classes, int32 beside) {
  // Vectors of a thread whose loads wait for memory together.
  constexpr int kAtOnce = kVectorised ? 2 : 1;
  __shared__ float scratch[kWarp];
  const uint32 row = blockIdx.x, first = kVector * threadIdx.x, stride = kVector * blockDim.x;
  T *x = logits + uint64(row) * classes;
  const PreviousLaunch previous(beside);
  if (row >= uint32(*live)) return;

  const uint32 label = target[row];
  const float at_label = to_float(x[label]);
  float top = kLowest, sum = 0.0f;
  for (uint32 j = first; j < classes; j += kAtOnce * stride) {
    Vector values[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; k++) values[k] = load<kVectorised>(x, j + k * stride, classes, -infinity());
    float highest = top;
#pragma unroll
    for (int i = 0; i < kAtOnce * kVector; i++) highest = fmaxf(highest, values[i / kVector].of[i % kVector]);
    if (highest > top) {
      sum *= expf(top - highest);
      top = highest;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce * kVector; i++) sum += expf(values[i / kVector].of[i % kVector] - top);
  }
  const float highest = block_max(top, scratch);
  const float total = block_sum(sum * expf(top - highest), scratch);
  if (threadIdx.x == 0) losses[row] = highest - at_label + logf(total);
  if constexpr (kGradient) {
    // Every thread has read the logit at the label before any overwrites it.
    __syncthreads();
    const float one = *loss_scale, scale = one / total;
    // Backwards: what was read last is the likeliest to be in a cache still.
    for (uint32 lap = pieces(classes, stride); lap-- > 0;) {
      const uint32 j = lap * stride + first;
      if (j >= classes) continue;
      Vector gradient = load<kVectorised>(x, j, classes);
#pragma unroll
      for (int i = 0; i < kVector; i++) {
        gradient.of[i] = expf(gradient.of[i] - highest) * scale;
        if (j + i == label) gradient.of[i] -= one;
      }
      store<kVectorised>(x, j, classes, gradient);
    }
  }
}

// Adds the live rows' losses, always in the same order, to the loss that is there. One block.
__global__ void __launch_bounds__(kMostThreads)
    sum_losses(const f32 *losses, const int32 *live, f32 *loss, int32 beside) {
  __shared__ float scratch[kWarp];
  const PreviousLaunch previous(beside);
  const uint32 rows = *live;
  float sum = 0.0f;
  for (uint32 row = threadIdx.x; row < rows; row += blockDim.x) sum += losses[row];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) *loss += sum;
}
