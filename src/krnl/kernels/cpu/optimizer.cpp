// The update: norm of the gradients, and AdamW. Both run over one contiguous region of fp32.
#include <cmath>

#include "rows.h"

namespace krnl {
namespace {

// In the order of HYPER in ops/optimizer.py.
struct Hyper {
  float lr, beta1, beta2, eps, weight_decay, clip, correction1, correction2, gradient_scale;
};

constexpr int64_t kNormBlock = 16384;  // elements to one partial sum; table.py knows this number

// Squares are formed in double: those of fp32 gradients can leave the range of fp32.
double sum_of_squares(const float* x, int64_t count) {
  constexpr int kLanes = 8;
  double sums[kLanes] = {};
  int64_t j = 0;
  for (; j + kLanes <= count; j += kLanes)
    for (int lane = 0; lane < kLanes; lane++) sums[lane] += static_cast<double>(x[j + lane]) * x[j + lane];
  for (; j < count; j++) sums[j % kLanes] += static_cast<double>(x[j]) * x[j];
  double total = 0;
  for (double s : sums) total += s;
  return total;
}

void gradient_norm(const Dispatch& d) {
  const float* grad = d[0].as<float>();
  const int64_t count = d[0].shape[0], blocks = (count + kNormBlock - 1) / kNormBlock;
  double* sums = workspace<double>(d, blocks, "gradient_norm");
  parallel_for(blocks, [&](int64_t block, int) {
    const int64_t first = block * kNormBlock;
    sums[block] = sum_of_squares(grad + first, std::min(kNormBlock, count - first));
  });
  double total = 0;
  for (int64_t block = 0; block < blocks; block++) total += sums[block];
  *d[2].as<float>() = static_cast<float>(std::sqrt(total) * std::fabs(d[1].as<Hyper>()->gradient_scale));
}

void adamw(const Dispatch& d) {
  const float norm = *d[1].as<float>();
  const Hyper& hyper = *d[2].as<Hyper>();
  if (!std::isfinite(norm)) return;
  const double shrink = hyper.clip > 0 ? std::min(1.0, hyper.clip / (norm + 1e-6)) : 1.0;
  const float scale = static_cast<float>(hyper.gradient_scale * shrink);
  const float beta1 = hyper.beta1, beta2 = hyper.beta2, rest1 = 1 - hyper.beta1, rest2 = 1 - hyper.beta2, eps = hyper.eps;
  const float keep = static_cast<float>(1 - double(hyper.lr) * hyper.weight_decay);
  const float rate = static_cast<float>(double(hyper.lr) / hyper.correction1);
  const float correction2 = 1 / hyper.correction2;
  for_rows(d[0].shape[0], 1, [&](int64_t first, int64_t last) {
    const float* __restrict grad = d[0].as<float>();
    float *__restrict param = d[3].as<float>(), *__restrict m = d[4].as<float>(), *__restrict v = d[5].as<float>();
    for (int64_t i = first; i < last; i++) {
      const float g = grad[i] * scale;
      m[i] = beta1 * m[i] + rest1 * g;
      v[i] = beta2 * v[i] + rest2 * g * g;
      param[i] = keep * param[i] - rate * m[i] / (std::sqrt(v[i] * correction2) + eps);
    }
  });
}

KRNL_KERNEL("gradient_norm", gradient_norm);
KRNL_KERNEL("adamw", adamw);

}  // namespace
}  // namespace krnl
