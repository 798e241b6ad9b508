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
  const double norm = std::sqrt(total) * std::fabs(d[2].as<Hyper>()->gradient_scale);
  *d[3].as<float>() = std::isfinite(*d[1].as<float>()) ? static_cast<float>(norm) : INFINITY;
}

// The factors of one update that are the same for every element.
struct Factors {
  float gradient, beta1, rest1, beta2, rest2, correction2, eps, keep, rate;
};

// A plain loop over pointers that do not overlap: the compiler makes vectors of it, square roots included.
void update(int64_t count, const float* __restrict grad, float* __restrict param, float* __restrict first,
            float* __restrict second, const Factors f) {
  for (int64_t i = 0; i < count; i++) {
    const float g = grad[i] * f.gradient;
    first[i] = f.beta1 * first[i] + f.rest1 * g;
    second[i] = f.beta2 * second[i] + f.rest2 * g * g;
    param[i] = f.keep * param[i] - f.rate * first[i] / (std::sqrt(second[i] * f.correction2) + f.eps);
  }
}

void adamw(const Dispatch& d) {
  const float norm = *d[1].as<float>();
  const Hyper& h = *d[2].as<Hyper>();
  if (!std::isfinite(norm)) return;
  const double shrink = h.clip > 0 ? std::min(1.0, h.clip / (norm + 1e-6)) : 1.0;
  Factors f = {};
  f.gradient = static_cast<float>(h.gradient_scale * shrink);
  f.beta1 = h.beta1;
  f.rest1 = 1 - h.beta1;
  f.beta2 = h.beta2;
  f.rest2 = 1 - h.beta2;
  f.correction2 = 1 / h.correction2;
  f.eps = h.eps;
  f.keep = static_cast<float>(1 - double(h.lr) * h.weight_decay);
  f.rate = static_cast<float>(double(h.lr) / h.correction1);
  for_rows(d[0].shape[0], 1, [&](int64_t begin, int64_t end) {
    auto from = [&](int argument) { return d[argument].as<float>() + begin; };
    update(end - begin, from(0), from(3), from(4), from(5), f);
  });
}

KRNL_KERNEL("gradient_norm", gradient_norm);
KRNL_KERNEL("adamw", adamw);

}  // namespace
}  // namespace krnl
