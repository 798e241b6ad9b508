// The matrix products of LoRA layers (ops/gemm.py): each a sum of terms and an epilogue.
#include "gemm.h"

namespace krnl {
namespace {

// x · wᵀ, w[o,k]
template <class T>
Term times_transposed(const T* x, int64_t stride, const Argument& w) {
  const int64_t k = w.shape[1];
  return {rows_of<CellOf<T>>(x, stride, k), {w.data, w.type, k, true}, k};
}
// dy · w, w[k,c]
template <class T>
Term times(const T* dy, int64_t stride, const Argument& w) {
  const int64_t k = w.shape[0];
  return {rows_of<CellOf<T>>(dy, stride, k), {w.data, w.type, w.shape[1], false}, k};
}

void check_group(const Dispatch& d, const char* kernel) {
  if (d.group <= kMembers) return;
  std::fprintf(stderr, "%s: a group has at most %d members, this one has %d\n", kernel, kMembers, d.group);
  std::abort();
}

template <class T>
void down(const Dispatch& d) {
  Arguments next(d);
  const Argument &x = next.one(), &a = next.one();
  const float* scale = next.one().as<float>();
  Product<1> product = {{}, next.live(), a.shape[0]};
  const Argument& u = next.one();
  product.sums[0].add(times_transposed(x.as<T>(), x.shape[1], a));
  multiply<T>(&product, 1, [&](int, int64_t i, int64_t j, int64_t n, Floats sum) {
    store_some(u.as<T>() + i * u.shape[1] + j, sum * load_some(scale + j, n), n);
  });
}

template <class T, class Out>
void linear_into(const Dispatch& d) {
  const int group = d.group;
  Arguments next(d);
  const Argument &x = next.one(), *w = next.many(group), &u = next.one(), *b = next.many(group), *bias = next.many(group);
  const Argument& residual = next.one();
  const int64_t rows = next.live();
  const Argument* y = next.many(group);
  Product<1> products[kMembers] = {};
  int64_t u_column = 0;
  for (int m = 0; m < group; m++) {
    products[m].rows = rows;
    products[m].columns = w[m].shape[0];
    products[m].sums[0].add(times_transposed(x.as<T>(), x.shape[1], w[m]));
    if (b[m]) {
      products[m].sums[0].add(times_transposed(u.as<T>() + u_column, u.shape[1], b[m]));
      u_column += b[m].shape[1];
    }
  }
  multiply<T>(products, group, [&](int m, int64_t i, int64_t j, int64_t n, Floats sum) {
    const int64_t at = i * products[m].columns + j;
    if (bias[m]) sum += load_some(bias[m].as<float>() + j, n);
    if (residual) sum += load_some(residual.as<T>() + at, n);
    store_some(y[m].as<Out>() + at, sum, n);
  });
}

// The outputs may be floats whatever x is: logits are.
template <class T>
void linear(const Dispatch& d) {
  if (d[d.argument_count - 1].type == Type::f32) linear_into<T, float>(d);
  else linear_into<T, T>(d);
}

template <class T>
void swiglu(const Dispatch& d) {
  Arguments next(d);
  const Argument &x = next.one(), *w = next.many(2), &u = next.one(), *b = next.many(2);
  Product<2> product = {{}, next.live(), w[0].shape[0]};
  const Argument &gate = next.one(), &up = next.one(), &act = next.one();
  int64_t u_column = 0;
  for (int m = 0; m < 2; m++) {
    product.sums[m].add(times_transposed(x.as<T>(), x.shape[1], w[m]));
    if (!b[m]) continue;
    product.sums[m].add(times_transposed(u.as<T>() + u_column, u.shape[1], b[m]));
    u_column += b[m].shape[1];
  }
  multiply<T>(&product, 1, [&](int, int64_t i, int64_t j, int64_t n, Floats g, Floats h) {
    const int64_t at = i * product.columns + j;
    store_some(gate.as<T>() + at, g, n);
    store_some(up.as<T>() + at, h, n);
    store_some(act.as<T>() + at, g * sigmoid(g) * h, n);
  });
}

template <class T>
void up_backward(const Dispatch& d) {
  const int group = d.group;
  Arguments next(d);
  const Argument *dy = next.many(group), *b = next.many(group);
  const float* scale = next.one().as<float>();
  const int64_t rows = next.live();
  const Argument& v = next.one();
  Product<1> products[kMembers] = {};
  int64_t v_column[kMembers], s = 0;
  for (int m = 0; m < group; m++) {
    v_column[m] = s;
    products[m].rows = rows;
    products[m].columns = b[m].shape[1];
    products[m].sums[0].add(times(dy[m].as<T>(), dy[m].shape[1], b[m]));
    s += b[m].shape[1];
  }
  multiply<T>(products, group, [&](int m, int64_t i, int64_t j, int64_t n, Floats sum) {
    j += v_column[m];
    store_some(v.as<T>() + i * s + j, sum * load_some(scale + j, n), n);
  });
}

template <class T>
void linear_backward(const Dispatch& d) {
  const int group = d.group;
  Arguments next(d);
  const Argument *dy = next.many(group), *w = next.many(group), &v = next.one(), &a = next.one();
  const int64_t rows = next.live();
  const Argument& dx = next.one();
  Product<1> product = {{}, rows, dx.shape[1]};
  for (int m = 0; m < group; m++) product.sums[0].add(times(dy[m].as<T>(), dy[m].shape[1], w[m]));
  if (a) product.sums[0].add(times(v.as<T>(), v.shape[1], a));
  multiply<T>(&product, 1, [&](int, int64_t i, int64_t j, int64_t n, Floats sum) {
    store_some(dx.as<T>() + i * product.columns + j, sum, n);
  });
}

template <class T>
void swiglu_backward(const Dispatch& d) {
  Arguments next(d);
  const Argument &dy = next.one(), &w = next.one(), &v = next.one(), &a = next.one(), &gate = next.one(), &up = next.one();
  Product<1> product = {{}, next.live(), w.shape[1]};
  const Argument &dgate = next.one(), &dup = next.one(), &act = next.one();
  product.sums[0].add(times(dy.as<T>(), dy.shape[1], w));
  if (a) product.sums[0].add(times(v.as<T>(), v.shape[1], a));
  multiply<T>(&product, 1, [&](int, int64_t i, int64_t j, int64_t n, Floats dact) {
    const int64_t at = i * product.columns + j;
    __builtin_prefetch(gate.as<T>() + at + MR * product.columns);  // for the next strip
    __builtin_prefetch(up.as<T>() + at + MR * product.columns);
    const Floats g = load_some(gate.as<T>() + at, n), h = load_some(up.as<T>() + at, n);
    const Floats s = sigmoid(g), silu = g * s;
    store_some(dgate.as<T>() + at, dact * h * (s + silu * (1.0f - s)), n);
    store_some(dup.as<T>() + at, dact * silu, n);
    store_some(act.as<T>() + at, silu * h, n);
  });
}

// narrowᵀ[s,n] as rows of cells: where it lies if it is made of floats, else in the workspace.
template <class T>
Rows transposed(const Dispatch& d, const T* narrow, int64_t n, int64_t s, const char* kernel) {
  using Cell = CellOf<T>;
  const int64_t stride = s * int64_t{sizeof(float)};
  if constexpr (std::is_same_v<T, float>) return {reinterpret_cast<const char*>(narrow), sizeof(float), stride, true};
  float* cells = workspace<float>(d, cells_of<Cell>(n) * s, kernel);
  for (int64_t cell = 0; cell < cells_of<Cell>(n); cell++)
    for_vectors(s, [&](int64_t j, int64_t count) {
      const int64_t k = cell * Cell::depth;
      store_some(cells + cell * s + j, across<Cell>(narrow + k * s + j, s, n - k, count), count);
    });
  return {reinterpret_cast<const char*>(cells), sizeof(float), stride, true};
}

template <class T>
void a_grad(const Dispatch& d) {
  Arguments next(d);
  const Argument &v = next.one(), &x = next.one();
  const int64_t n = next.live(), s = v.shape[1], c = x.shape[1];
  const Argument& da = next.one();
  if (n == 0) return;
  Product<1> product = {{}, s, c};
  product.sums[0].add({transposed(d, v.as<T>(), n, s, "lora_a_grad"), {x.data, x.type, c, false}, n});
  multiply<T>(&product, 1, [&](int, int64_t i, int64_t j, int64_t count, Floats sum) {
    float* to = da.as<float>() + i * c + j;
    store_some(to, load_some(to, count) + sum, count);
  });
}

// dBᵀ = uᵀ dy is computed, because rows are the side that may be short, and added to dB across.
template <class T>
void b_grad(const Dispatch& d) {
  const int group = d.group;
  Arguments next(d);
  const Argument *dy = next.many(group), &u = next.one();
  const int64_t n = next.live(), s = u.shape[1];
  const Argument* db = next.many(group);
  if (n == 0) return;
  Rows rows = transposed(d, u.as<T>(), n, s, "lora_b_grad");
  Product<1> products[kMembers] = {};
  for (int m = 0; m < group; m++) {
    products[m].rows = db[m].shape[1];
    products[m].columns = dy[m].shape[1];
    products[m].sums[0].add({rows, {dy[m].data, dy[m].type, dy[m].shape[1], false}, n});
    rows.data += products[m].rows * rows.row;
  }
  multiply<T>(products, group, [&](int m, int64_t i, int64_t j, int64_t count, Floats sum) {
    alignas(64) float values[W];
    store(values, sum);
    float* to = db[m].as<float>() + j * products[m].rows + i;
    for (int64_t k = 0; k < count; k++) to[k * products[m].rows] += values[k];
  });
}

#define KRNL_LINEAR(name, function)                   \
  void name(const Dispatch& d) {                      \
    check_group(d, #name);                            \
    if (d[0].type == Type::f32) function<float>(d);   \
    else function<bf16>(d);                           \
  }                                                   \
  KRNL_KERNEL(#name, name)

KRNL_LINEAR(lora_down, down);
KRNL_LINEAR(lora_linear, linear);
KRNL_LINEAR(lora_swiglu, swiglu);
KRNL_LINEAR(lora_up_backward, up_backward);
KRNL_LINEAR(lora_linear_backward, linear_backward);
KRNL_LINEAR(lora_swiglu_backward, swiglu_backward);
KRNL_LINEAR(lora_a_grad, a_grad);
KRNL_LINEAR(lora_b_grad, b_grad);

}  // namespace
}  // namespace krnl
