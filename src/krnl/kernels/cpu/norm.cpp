// RMS normalisation of rows (rms_norm) and of the heads within rows (head_norm: more rows, shorter ones).
#include <cmath>

#include "rows.h"

namespace krnl {
namespace {

template <class T>
void norm_rows(const T* x, const float* w, T* y, float* rstd, int64_t rows, int64_t width, double eps) {
  for_rows(rows, width, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const T* xi = x + i * width;
      T* yi = y + i * width;
      Floats squares = {};
      for_vectors(width, [&](int64_t j, int64_t n) {
        Floats v = load_some(xi + j, n);
        squares += v * v;
      });
      const float r = static_cast<float>(1 / std::sqrt(sum(squares) / static_cast<double>(width) + eps));
      for_vectors(width, [&](int64_t j, int64_t n) { store_some(yi + j, load_some(xi + j, n) * r * load_some(w + j, n), n); });
      rstd[i] = r;
    }
  });
}

// dx = rstd (g - x̂ mean(g ∘ x̂)) + residual, with x̂ = x · rstd and g = dy ∘ w.
template <class T>
void norm_rows_backward(const T* dy, const T* x, const float* w, const float* rstd, const T* residual, T* dx, int64_t rows,
                        int64_t width) {
  for_rows(rows, width, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++) {
      const T *dyi = dy + i * width, *xi = x + i * width, *ri = residual + (residual ? i * width : 0);
      T* dxi = dx + i * width;
      Floats products = {};
      for_vectors(width, [&](int64_t j, int64_t n) {
        products += load_some(dyi + j, n) * load_some(w + j, n) * load_some(xi + j, n);
      });
      const float r = rstd[i];
      const float slope = static_cast<float>(double(r) * r * r * sum(products) / static_cast<double>(width));
      for_vectors(width, [&](int64_t j, int64_t n) {
        Floats v = load_some(dyi + j, n) * load_some(w + j, n) * r - load_some(xi + j, n) * slope;
        if (residual) v += load_some(ri + j, n);
        store_some(dxi + j, v, n);
      });
    }
  });
}

void rms_norm(const Dispatch& d) {
  const Argument &x = d[0], &w = d[1], &y = d[3], &rstd = d[4];
  with_activation(x.type, [&](auto zero) {
    using T = decltype(zero);
    norm_rows(x.as<T>(), w.as<float>(), y.as<T>(), rstd.as<float>(), d.live(2), x.shape[1], d.attributes[0]);
  });
}

void head_norm(const Dispatch& d) {
  const Argument &x = d[0], &w = d[1], &y = d[3], &rstd = d[4];
  const int64_t rows = d.live(2) * x.shape[1], width = x.shape[2];
  with_activation(x.type, [&](auto zero) {
    using T = decltype(zero);
    norm_rows(x.as<T>(), w.as<float>(), y.as<T>(), rstd.as<float>(), rows, width, d.attributes[0]);
  });
}

void rms_norm_backward(const Dispatch& d) {
  const Argument &dy = d[0], &x = d[1], &w = d[2], &rstd = d[3], &residual = d[4], &dx = d[6];
  const int64_t rows = d.live(5), width = x.shape[1];
  with_activation(x.type, [&](auto zero) {
    using T = decltype(zero);
    norm_rows_backward(dy.as<T>(), x.as<T>(), w.as<float>(), rstd.as<float>(), residual.as<T>(), dx.as<T>(), rows, width);
  });
}

void head_norm_backward(const Dispatch& d) {
  const Argument &dy = d[0], &x = d[1], &w = d[2], &rstd = d[3], &dx = d[5];
  const int64_t rows = d.live(4) * x.shape[1], width = x.shape[2];
  with_activation(x.type, [&](auto zero) {
    using T = decltype(zero);
    const T* residual = nullptr;
    norm_rows_backward(dy.as<T>(), x.as<T>(), w.as<float>(), rstd.as<float>(), residual, dx.as<T>(), rows, width);
  });
}

KRNL_KERNEL("rms_norm", rms_norm);
KRNL_KERNEL("head_norm", head_norm);
KRNL_KERNEL("rms_norm_backward", rms_norm_backward);
KRNL_KERNEL("head_norm_backward", head_norm_backward);

}  // namespace
}  // namespace krnl
