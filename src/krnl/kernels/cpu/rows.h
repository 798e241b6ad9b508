// What the row-wise kernels share: choosing templates by element type, and sharing rows out to the threads.
#pragma once
#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "kernel.h"
#include "parallel.h"
#include "simd.h"

namespace krnl {

// Calls body(T{}) with the element type T: any float, or one of the two that activations have.
template <class Body>
void with_float(Type type, const Body& body) {
  if (type == Type::f32) body(float{});
  else if (type == Type::f16) body(f16{});
  else body(bf16{});
}
template <class Body>
void with_activation(Type type, const Body& body) {
  if (type == Type::f32) body(float{});
  else body(bf16{});
}

// Calls body(first, last) for ranges that make up [0, rows). Where they are cut must not matter to the result.
template <class Body>
void for_rows(int64_t rows, int64_t elements_per_row, const Body& body) {
  constexpr int64_t kElements = 16384;  // some microseconds of work: enough to be worth a piece of its own
  const int64_t step = std::max<int64_t>(1, kElements / std::max<int64_t>(1, elements_per_row));
  parallel_for((rows + step - 1) / step, [&](int64_t piece, int) { body(piece * step, std::min(rows, (piece + 1) * step)); });
}

// The dispatch's workspace; table.py promises that it is large enough.
template <class T>
T* workspace(const Dispatch& d, int64_t count, const char* kernel) {
  const int64_t bytes = count * static_cast<int64_t>(sizeof(T));
  if (d.workspace_bytes < bytes) {
    std::fprintf(stderr, "%s: needs %lld bytes of workspace, table.py gave %lld\n", kernel, static_cast<long long>(bytes),
                 static_cast<long long>(d.workspace_bytes));
    std::abort();
  }
  return static_cast<T*>(d.workspace);
}

// Calls body(j, n) for vectors of n elements that begin at j and make up [0, count). Once inlined, n is the constant W in
// the main loop, and load_some and store_some are plain loads and stores.
template <class Body>
inline void for_vectors(int64_t count, const Body& body) {
  int64_t j = 0;
  for (; j + W <= count; j += W) body(j, int64_t{W});
  if (j < count) body(j, count - j);
}

// to[i] = from[i], rounded once.
template <class From, class To>
void convert(const From* from, To* to, int64_t count) {
  for_vectors(count, [&](int64_t j, int64_t n) { store_some(to + j, load_some(from + j, n), n); });
}
template <class T>
void convert(const T* from, T* to, int64_t count) {
  std::memcpy(to, from, count * sizeof(T));
}

}  // namespace krnl
