// Row-wise and element-wise ops: embedding, gather_rows, cast, zero, swiglu and its gradient, rope_table, rope.
#include <cmath>

#include "rows.h"

namespace krnl {
namespace {

// Row index[i] of `from` into row i of `to`, zeros where index[i] is negative.
void copy_rows(const Argument& from, const int32_t* index, const Argument& to, int64_t rows) {
  const int64_t width = to.shape[1];
  with_float(from.type, [&](auto from_zero) {
    with_activation(to.type, [&](auto to_zero) {
      using From = decltype(from_zero);
      using To = decltype(to_zero);
      for_rows(rows, width, [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; i++) {
          To* row = to.as<To>() + i * width;
          if (index[i] < 0) std::memset(static_cast<void*>(row), 0, width * sizeof(To));
          else convert(from.as<From>() + index[i] * width, row, width);
        }
      });
    });
  });
}

void embedding(const Dispatch& d) { copy_rows(d[1], d[0].as<int32_t>(), d[3], d.live(2)); }
void gather_rows(const Dispatch& d) { copy_rows(d[0], d[1].as<int32_t>(), d[3], d.live(2)); }

void cast(const Dispatch& d) {
  with_float(d[0].type, [&](auto from_zero) {
    with_float(d[1].type, [&](auto to_zero) {
      using From = decltype(from_zero);
      using To = decltype(to_zero);
      for_rows(d[0].shape[0], 1, [&](int64_t first, int64_t last) {
        convert(d[0].as<From>() + first, d[1].as<To>() + first, last - first);
      });
    });
  });
}

void zero(const Dispatch& d) {
  float* x = d[0].as<float>();
  for_rows(d[0].shape[0], 1, [&](int64_t first, int64_t last) { std::fill(x + first, x + last, 0.0f); });
}

void swiglu(const Dispatch& d) {
  with_activation(d[0].type, [&](auto zero) {
    using T = decltype(zero);
    for_rows(d.live(2) * d[0].shape[1], 1, [&](int64_t first, int64_t last) {
      const T *gate = d[0].as<T>() + first, *up = d[1].as<T>() + first;
      T* act = d[3].as<T>() + first;
      for_vectors(last - first, [&](int64_t j, int64_t n) {
        Floats g = load_some(gate + j, n);
        store_some(act + j, g * sigmoid(g) * load_some(up + j, n), n);
      });
    });
  });
}

void swiglu_backward(const Dispatch& d) {
  with_activation(d[0].type, [&](auto zero) {
    using T = decltype(zero);
    for_rows(d.live(3) * d[0].shape[1], 1, [&](int64_t first, int64_t last) {
      const T *dact = d[0].as<T>() + first, *gate = d[1].as<T>() + first, *up = d[2].as<T>() + first;
      T *dgate = d[4].as<T>() + first, *dup = d[5].as<T>() + first, *act = d[6].as<T>() + first;
      for_vectors(last - first, [&](int64_t j, int64_t n) {
        Floats da = load_some(dact + j, n), g = load_some(gate + j, n), u = load_some(up + j, n);
        Floats s = sigmoid(g), silu = g * s;
        store_some(dgate + j, da * u * (s + silu * (1.0f - s)), n);
        store_some(dup + j, da * silu, n);
        store_some(act + j, silu * u, n);
      });
    });
  });
}

void rope_table(const Dispatch& d) {
  const int32_t* position = d[0].as<int32_t>();
  const float* inv_freq = d[1].as<float>();
  const int64_t pairs = d[1].shape[0];
  const double scale = d.attributes[0];
  for_rows(d.live(2), 16 * pairs, [&](int64_t first, int64_t last) {  // a cosine costs as much as many plain elements
    for (int64_t i = first; i < last; i++)
      for (int64_t j = 0; j < pairs; j++) {
        const double angle = double(position[i]) * inv_freq[j];
        d[3].as<float>()[i * pairs + j] = static_cast<float>(scale * std::cos(angle));
        d[4].as<float>()[i * pairs + j] = static_cast<float>(scale * std::sin(angle));
      }
  });
}

void rope(const Dispatch& d) {
  const int64_t heads = d[0].shape[1], size = d[0].shape[2], half = size / 2;
  const float sign = static_cast<float>(d.attributes[0]);
  with_activation(d[0].type, [&](auto zero) {
    using T = decltype(zero);
    for_rows(d.live(3), heads * size, [&](int64_t first, int64_t last) {
      for (int64_t head = first * heads; head < last * heads; head++) {
        const T *a = d[0].as<T>() + head * size, *b = a + half;
        const float *cos = d[1].as<float>() + head / heads * half, *sin = d[2].as<float>() + head / heads * half;
        T *ya = d[4].as<T>() + head * size, *yb = ya + half;
        for_vectors(half, [&](int64_t j, int64_t n) {
          Floats va = load_some(a + j, n), vb = load_some(b + j, n), c = load_some(cos + j, n), s = sign * load_some(sin + j, n);
          store_some(ya + j, va * c - vb * s, n);
          store_some(yb + j, vb * c + va * s, n);
        });
      }
    });
  });
}

KRNL_KERNEL("embedding", embedding);
KRNL_KERNEL("gather_rows", gather_rows);
KRNL_KERNEL("cast", cast);
KRNL_KERNEL("zero", zero);
KRNL_KERNEL("swiglu", swiglu);
KRNL_KERNEL("swiglu_backward", swiglu_backward);
KRNL_KERNEL("rope_table", rope_table);
KRNL_KERNEL("rope", rope);

}  // namespace
}  // namespace krnl
