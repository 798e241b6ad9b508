// Cross-entropy over rows of logits, alone or with its gradient written over them.
#include <cmath>

#include "rows.h"

namespace krnl {
namespace {

// e^x for x ≤ 0, cheaper than exp.
inline Floats decay(Floats x) { return exp2(x * kLog2e); }

// log Σ exp(x) in one pass over memory: the sum is scaled down whenever a block raises the maximum.
template <class T>
double log_sum_exp(const T* x, int64_t count) {
  constexpr int64_t kBlock = 4096;  // stays in L1 between its two readings
  const float lowest = -__builtin_inff();
  float top = lowest;
  double total = 0;
  for (int64_t first = 0; first < count; first += kBlock) {
    const T* block = x + first;
    const int64_t size = std::min(kBlock, count - first);
    Floats tops = broadcast(lowest), sums = {};
    for_vectors(size, [&](int64_t j, int64_t n) { tops = max(load_some(block + j, n, lowest), tops); });
    const float above = std::max(top, largest(tops));
    for_vectors(size, [&](int64_t j, int64_t n) { sums += decay(load_some(block + j, n, lowest) - above); });
    total = total * std::exp(double(top) - above) + sum(sums);
    top = above;
  }
  return top + std::log(total);
}

// Every row's loss by body(row), in parallel; then their sum in order, added to the one that is there.
template <class Body>
void add_losses(const Dispatch& d, const char* kernel, int64_t rows, int64_t classes, float* loss, const Body& body) {
  double* losses = workspace<double>(d, rows, kernel);
  for_rows(rows, classes, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) losses[i] = body(i);
  });
  double total = *loss;
  for (int64_t i = 0; i < rows; i++) total += losses[i];
  *loss = static_cast<float>(total);
}

void cross_entropy(const Dispatch& d) {
  const int32_t* target = d[0].as<int32_t>();
  const float loss_scale = *d[1].as<float>();
  const int64_t classes = d[4].shape[1];
  with_activation(d[4].type, [&](auto zero) {
    using T = decltype(zero);
    add_losses(d, "cross_entropy", d.live(2), classes, d[3].as<float>(), [&](int64_t i) {
      T* x = d[4].as<T>() + i * classes;
      const double lse = log_sum_exp(x, classes);
      const float at_target = to_float(x[target[i]]), shift = static_cast<float>(lse);
      for_vectors(classes, [&](int64_t j, int64_t n) { store_some(x + j, decay(load_some(x + j, n) - shift) * loss_scale, n); });
      x[target[i]] = from_float<T>(loss_scale * static_cast<float>(std::expm1(at_target - lse)));
      return lse - at_target;
    });
  });
}

void cross_entropy_loss(const Dispatch& d) {
  const int32_t* target = d[1].as<int32_t>();
  const int64_t classes = d[0].shape[1];
  with_activation(d[0].type, [&](auto zero) {
    using T = decltype(zero);
    add_losses(d, "cross_entropy_loss", d.live(2), classes, d[3].as<float>(), [&](int64_t i) {
      const T* x = d[0].as<T>() + i * classes;
      return log_sum_exp(x, classes) - to_float(x[target[i]]);
    });
  });
}

KRNL_KERNEL("cross_entropy", cross_entropy);
KRNL_KERNEL("cross_entropy_loss", cross_entropy_loss);

}  // namespace
}  // namespace krnl
