// The update: norm of the gradients, and AdamW. Both run over one contiguous region of float.
#include "rows.h"

// In the order of HYPER in ops/optimizer.py.
struct Hyper {
  float lr, beta1, beta2, eps, weight_decay, clip, correction1, correction2, gradient_scale;
};

struct Blocks {
  uint32 count, block;  // gradients in all, and in a block
};

// The sum of squares of a block's gradients, each multiplied by gradient_scale first: their own squares would leave the
// range of float earlier than those of the mean gradient. Not finite where a gradient is not.
template <bool kVectorised>
__global__ void __launch_bounds__(kMostThreads)
    sum_squares(const f32 *grad, const Hyper *hyper, f32 *sums, const Blocks blocks, int32 beside) {
  __shared__ float scratch[kWarp];
  const uint32 start = blockIdx.x * blocks.block, size = min_of(blocks.block, blocks.count - start);
  const f32 *own = grad + start;
  const PreviousLaunch previous(beside);
  const float scale = hyper->gradient_scale;
  float squares = 0.0f;
#pragma unroll 2
  for (uint32 j = kVector * threadIdx.x; j < size; j += kVector * blockDim.x) {
    const Vector values = load<kVectorised>(own, j, size);
#pragma unroll
    for (int i = 0; i < kVector; i++) {
      const float mean = values.of[i] * scale;
      squares += mean * mean;
    }
  }
  const float sum = block_sum(squares, scratch);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

// The root of the sum of the blocks, in one block. Not finite where the loss is not: adamw, and the host, look at the
// norm alone.
__global__ void __launch_bounds__(kMostThreads)
    gradient_norm(const f32 *sums, const f32 *loss, f32 *norm, const uint32 count, int32 beside) {
  __shared__ float scratch[kWarp];
  const PreviousLaunch previous(beside);
  float sum = 0.0f;
  for (uint32 block = threadIdx.x; block < count; block += blockDim.x) sum += sums[block];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) *norm = is_finite(*loss) ? sqrtf(sum) : infinity();
}

// AdamW (Loshchilov & Hutter 2019) on the gradient clipped to norm `clip` (0: not clipped). Does nothing when the norm
// is not finite.
template <bool kVectorised>
__global__ void __launch_bounds__(kPointwiseThreads)
    adamw(const f32 *grad, const f32 *norm, const Hyper *hyper, f32 *param, f32 *first, f32 *second,
          const uint32 count, int32 beside) {
  const uint64 at = first_element();
  const PreviousLaunch previous(beside);
  if (at >= count || !is_finite(*norm)) return;
  const Hyper h = *hyper;
  const uint32 j = uint32(at);
  const float shrink = h.clip > 0.0f ? fminf(1.0f, h.clip / (*norm + 1e-6f)) : 1.0f;
  const float scale = h.gradient_scale * shrink, decay = 1.0f - h.lr * h.weight_decay;
  const Vector g = load<kVectorised>(grad, j, count);
  Vector p = load<kVectorised>(param, j, count), m = load<kVectorised>(first, j, count),
         v = load<kVectorised>(second, j, count);
#pragma unroll
  for (int i = 0; i < kVector; i++) {
    const float mean = g.of[i] * scale;
    m.of[i] = h.beta1 * m.of[i] + (1.0f - h.beta1) * mean;
    v.of[i] = h.beta2 * v.of[i] + (1.0f - h.beta2) * mean * mean;
    const float step = m.of[i] / h.correction1 / (sqrtf(v.of[i] / h.correction2) + h.eps);
    p.of[i] = p.of[i] * decay - h.lr * step;
  }
  store<kVectorised>(first, j, count, m);
  store<kVectorised>(second, j, count, v);
  store<kVectorised>(param, j, count, p);
}
