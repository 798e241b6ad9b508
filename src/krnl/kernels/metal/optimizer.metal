// The update: norm of the gradients, and AdamW. Both run over one contiguous region of float.
//
// A gradient or loss that is not finite is found in its bits, and the norm is then infinite: that is the sign of overflow which
// adamw, and the host, look for. Results that may be infinite are written as bits, too.
#include "rows.h"

constant constexpr uint kInfinity = 0x7F800000u;

// In the order of HYPER in ops/optimizer.py.
struct Hyper {
  float lr, beta1, beta2, eps, weight_decay, clip, correction1, correction2, gradient_scale;
};

struct Blocks {
  uint count, block;  // gradients in all, and in a block
};

// The sum of squares of a block's gradients, each multiplied by gradient_scale first: their own squares would leave the
// range of float earlier than those of the mean gradient. Infinity where a gradient is not finite.
kernel void sum_squares(device const uint *grad [[buffer(0)]], device const Hyper &hyper [[buffer(1)]],
                        device uint *sums [[buffer(2)]], constant Blocks &blocks [[buffer(3)]],
                        uint block [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]],
                        uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[kSimdgroups];
  const uint first = block * blocks.block, size = min(blocks.block, blocks.count - first);
  float4 squares = float4(0.0f);
  uint overflows = 0;
  for (uint j = 4 * thread_index; j < size; j += 4 * threads) {
    const uint4 bits = read4(grad + first, j, size);
    const float4 mean = as_type<float4>(bits) * hyper.gradient_scale;
    squares += mean * mean;
    for (uint i = 0; i < 4; i++) overflows += is_finite(bits[i]) ? 0 : 1;
  }
  const float sum = threadgroup_sum(squares.x + squares.y + squares.z + squares.w, scratch, thread_index, threads);
  const float any = threadgroup_sum(float(overflows), scratch, thread_index, threads);
  if (thread_index == 0) sums[block] = any > 0.0f ? kInfinity : as_type<uint>(sum);
}

// The root of the sum of the blocks, in one threadgroup.
kernel void gradient_norm(device const uint *sums [[buffer(0)]], device const uint *loss [[buffer(1)]],
                          device uint *norm [[buffer(2)]], constant uint &count [[buffer(3)]],
                          uint thread_index [[thread_index_in_threadgroup]], uint threads [[threads_per_threadgroup]]) {
  threadgroup float scratch[kSimdgroups];
  float sum = 0.0f;
  uint overflows = is_finite(*loss) ? 0 : 1;
  for (uint block = thread_index; block < count; block += threads) {
    const uint bits = sums[block];
    sum += as_type<float>(bits);
    overflows += is_finite(bits) ? 0 : 1;
  }
  sum = threadgroup_sum(sum, scratch, thread_index, threads);
  const float any = threadgroup_sum(float(overflows), scratch, thread_index, threads);
  if (thread_index == 0) *norm = any > 0.0f ? kInfinity : as_type<uint>(precise::sqrt(sum));
}

// AdamW (Loshchilov & Hutter 2019) on the gradient clipped to norm `clip` (0: not clipped). Does nothing when the norm
// is not finite.
kernel void adamw(device const float *grad [[buffer(0)]], device const uint *norm [[buffer(1)]],
                  device const Hyper &hyper [[buffer(2)]], device float *param [[buffer(3)]],
                  device float *first [[buffer(4)]], device float *second [[buffer(5)]],
                  constant uint &count [[buffer(6)]], uint at [[thread_position_in_grid]]) {
  const uint j = 4 * at;
  if (!is_finite(*norm) || j >= count) return;
  const float limit = hyper.clip / (as_type<float>(*norm) + 1e-6f);
  const float shrink = hyper.clip > 0.0f ? min(1.0f, limit) : 1.0f;
  const float4 g = load4(grad, j, count) * (hyper.gradient_scale * shrink);
  const float4 m = hyper.beta1 * load4(first, j, count) + (1.0f - hyper.beta1) * g;
  const float4 v = hyper.beta2 * load4(second, j, count) + (1.0f - hyper.beta2) * g * g;
  const float4 step = m / hyper.correction1 / (precise::sqrt(v / hyper.correction2) + hyper.eps);
  store4(first, j, count, m);
  store4(second, j, count, v);
  store4(param, j, count, load4(param, j, count) * (1.0f - hyper.lr * hyper.weight_decay) - hyper.lr * step);
}
