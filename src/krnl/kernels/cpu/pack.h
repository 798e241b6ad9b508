// Operands of matrix products, brought into the form in which the inner loop reads them: cells.
//
// A cell is the 32 bits that one lane of a vector multiplies in one instruction: one float, or, where the processor has
// bf16 dot products, two bf16 that follow each other along k. `depth` is the values of k in a cell; what is missing to a
// whole cell is zero.
#pragma once
#include <algorithm>
#include <type_traits>
#include <utility>

#include "kernel.h"
#include "simd.h"

namespace krnl {

#define KRNL_INLINE inline __attribute__((always_inline))
#if defined(__clang__)
#define KRNL_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KRNL_UNROLL _Pragma("GCC unroll 32")
#endif

struct Single {
  static constexpr int depth = 1;
  template <class T>
  static constexpr bool reads = std::is_same_v<T, float>;  // T in memory is made of such cells already

  static Floats multiply_add(Floats sum, Floats a, Floats b) { return sum + a * b; }
  // W cells from values that follow each other along k.
  template <class T>
  static Floats along(const T* p) { return load(p); }
  // W cells, one for each of W columns, from `depth` rows of k.
  template <class T>
  static Floats across(const T* p, int64_t) { return load(p); }
};

#if defined(__AVX512BF16__) && defined(__AVX512F__)
struct Pair {
  static constexpr int depth = 2;
  template <class T>
  static constexpr bool reads = std::is_same_v<T, bf16>;

  static Floats multiply_add(Floats sum, Floats a, Floats b) { return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b); }
  template <class T>
  static Floats along(const T* p) {
    if constexpr (reads<T>) return load(reinterpret_cast<const float*>(p));
    else return (Floats)_mm512_cvtne2ps_pbh((__m512)load(p + W), (__m512)load(p));
  }
  template <class T>
  static Floats across(const T* p, int64_t row) {
    const Halves low = halves(p), high = halves(p + row);
    return (Floats)__builtin_shufflevector(low, high, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23, 8, 24, 9, 25, 10, 26,
                                           11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  }

 private:
  // W values, rounded to bf16.
  template <class T>
  static Halves halves(const T* p) {
    Halves h;
    if constexpr (reads<T>) std::memcpy(&h, p, sizeof h);
    else h = (Halves)_mm512_cvtneps_pbh((__m512)load(p));
    return h;
  }
};
// bf16 activations are multiplied as pairs; a weight of another type is rounded to bf16 on the way.
template <class Activation>
using CellOf = std::conditional_t<std::is_same_v<Activation, bf16>, Pair, Single>;
#else
template <class Activation>
using CellOf = Single;
#endif

template <class Cell>
constexpr int64_t cells_of(int64_t k) { return (k + Cell::depth - 1) / Cell::depth; }

// The same with only the first k values, or the first k rows and `columns` columns, there to be read.
template <class Cell, class T>
KRNL_INLINE Floats along(const T* p, int64_t k) {
  constexpr int whole = W * Cell::depth;
  if (k >= whole) return Cell::along(p);
  T padded[whole] = {};
  std::memcpy(padded, p, std::max<int64_t>(k, 0) * sizeof(T));
  return Cell::along(padded);
}
template <class Cell, class T>
Floats across(const T* p, int64_t row, int64_t k, int64_t columns) {
  if (k >= Cell::depth && columns >= W) return Cell::across(p, row);
  T padded[Cell::depth * W] = {};
  for (int i = 0; i < Cell::depth && i < k; i++) std::memcpy(padded + i * W, p + i * row, std::min<int64_t>(columns, W) * sizeof(T));
  return Cell::across(padded, W);
}

// Transposes a W×W block held in W vectors: blocks of 1, 2, 4... change places across the diagonal.
template <int size, size_t... lane>
KRNL_INLINE void exchange(Floats& a, Floats& b, std::index_sequence<lane...>) {
  constexpr auto w = size_t{W};
  Floats upper = __builtin_shufflevector(a, b, (lane & size ? w + lane - size : lane)...);
  b = __builtin_shufflevector(a, b, (lane & size ? w + lane : lane + size)...);
  a = upper;
}
template <int size = 1>
KRNL_INLINE void transpose(Floats (&block)[W]) {
  KRNL_UNROLL
  for (int i = 0; i < W; i++)
    if (!(i & size)) exchange<size>(block[i], block[i + size], std::make_index_sequence<W>{});
  if constexpr (2 * size < W) transpose<2 * size>(block);
}

// The right-hand operand: entry (k, j) of a matrix of float, f16 or bf16.
struct Weights {
  const void* data;
  Type type;
  int64_t stride;  // elements from one row of the memory to the next
  bool along;      // whether a row holds the values of one column j (W in x Wᵀ) or those of one k (W in dy W)
};

// Where W columns of a packed panel go: cell c of the columns at cells + c * stride.
struct Lanes {
  float* cells;
  int64_t stride;
};
constexpr int kMaxLanes = 12;

// W columns of W cells each; `k` and `columns` are there to be read. Once inlined, full blocks have no checks.
template <class Cell, class T>
KRNL_INLINE void pack_block(const T* w, int64_t stride, int64_t k, int64_t columns, float* to, int64_t to_stride) {
  Floats t[W];
  KRNL_UNROLL
  for (int i = 0; i < W; i++) t[i] = i < columns ? along<Cell>(w + i * stride, k) : Floats{};
  transpose(t);
  KRNL_UNROLL
  for (int i = 0; i < W; i++)
    if (i * Cell::depth < k) store(to + i * to_stride, t[i]);
}

template <class Cell, class T>
void pack_along(const T* w, int64_t stride, int64_t k, int64_t columns, const Lanes* lanes) {
  constexpr int64_t whole = W * Cell::depth;
  for (int64_t j = 0; j < columns; j += W, lanes++, w += W * stride) {
    const int64_t step = lanes->stride;
    float* to = lanes->cells;
    int64_t at = 0;
    if (columns - j >= W)
      for (; at + whole <= k; at += whole, to += W * step) pack_block<Cell>(w + at, stride, whole, W, to, step);
    for (; at < k; at += whole, to += W * step) pack_block<Cell>(w + at, stride, k - at, columns - j, to, step);
  }
}

template <class Cell, class T>
void pack_across(const T* w, int64_t stride, int64_t k, int64_t columns, const Lanes* lanes) {
  constexpr int64_t ahead = 32;  // rows: each lies in another page, where the processor does not look ahead by itself
  const int count = static_cast<int>((columns + W - 1) / W);
  float* to[kMaxLanes];
  for (int v = 0; v < count; v++) to[v] = lanes[v].cells;
  auto pack_row = [&](int64_t k_left, int whole) {
    for (int v = 0; v < count; v++) {
      const T* from = w + v * W;
      for (int i = 0; i < Cell::depth; i++) __builtin_prefetch(from + (ahead + i) * stride);
      store(to[v], v < whole ? Cell::across(from, stride) : across<Cell>(from, stride, k_left, columns - v * W));
      to[v] += lanes[v].stride;
    }
    w += Cell::depth * stride;
  };
  for (; k >= Cell::depth; k -= Cell::depth) pack_row(Cell::depth, static_cast<int>(columns / W));
  if (k > 0) pack_row(k, 0);
}

// Calls body(pointer to the first element) with the weights' element type.
template <class Body>
void with_elements(const Weights& w, const Body& body) {
  if (w.type == Type::f32) body(static_cast<const float*>(w.data));
  else if (w.type == Type::f16) body(static_cast<const f16*>(w.data));
  else body(static_cast<const bf16*>(w.data));
}

// Packs columns [j, j + columns) of k values [first, first + k).
template <class Cell>
void pack(const Weights& weights, int64_t first, int64_t k, int64_t j, int64_t columns, const Lanes* lanes) {
  with_elements(weights, [&](auto* w) {
    if (weights.along) pack_along<Cell>(w + j * weights.stride + first, weights.stride, k, columns, lanes);
    else pack_across<Cell>(w + first * weights.stride + j, weights.stride, k, columns, lanes);
  });
}

// The left-hand operand: rows of cells. Cell c of row i lies at data + i * row + c * cell, in bytes. Rows that are not
// made of cells yet (bf16 where it must become float, an odd k of pairs) hold k values of the activation type instead,
// and are converted a few at a time where they are used.
struct Rows {
  const char* data;
  int64_t row, cell;
  bool ready;
};

template <class Cell, class T>
Rows rows_of(const T* data, int64_t stride, int64_t k) {
  const bool ready = Cell::template reads<T> && k % Cell::depth == 0;
  return {reinterpret_cast<const char*>(data), stride * int64_t{sizeof(T)}, Cell::depth * int64_t{sizeof(T)}, ready};
}

// One row's cells for k values.
template <class Cell, class T>
void copy_cells(const T* from, int64_t k, float* to) {
  const int64_t cells = cells_of<Cell>(k);
  int64_t cell = 0;
  for (; cell + W <= k / Cell::depth; cell += W) store(to + cell, Cell::along(from + cell * Cell::depth));
  if (cell < cells) store_some(to + cell, along<Cell>(from + cell * Cell::depth, k - cell * Cell::depth), cells - cell);
}

}  // namespace krnl
