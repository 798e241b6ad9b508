// What attention's forward and backward share: products of tiles that lie in the nearest cache, and packing for them.
//
// Operands are made of cells (pack.h): one float, or a pair of bf16 that follow each other along k. A product takes its
// left operand as rows of cells, of which one at a time is broadcast, and its right operand as vectors of cells, one for
// each column.
#pragma once
#include "pack.h"
#include "rows.h"

namespace krnl {

// A strip of up to this many rows and kStripVectors vectors of columns stays in registers, with a row of the right
// operand and one cell of the left.
constexpr int kStrip = 6;
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int kStripVectors = 4;
#else
constexpr int kStripVectors = 2;
#endif

// What one cell holds.
template <class Cell>
using Element = std::conditional_t<Cell::depth == 2, bf16, float>;
template <class Cell>
Element<Cell>* elements(float* cells) { return reinterpret_cast<Element<Cell>*>(cells); }

inline int64_t round_up(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

// Cell (i, k) of the left operand lies at cells + i * row + k * step.
struct Left {
  const float* cells;
  int64_t row, step;
};
// Cell (k, j) of the right operand at cells + k * step + j; element (i, j) of a sum at cells + i * step + j.
struct Right {
  const float* cells;
  int64_t step;
};
struct Sums {
  float* cells;
  int64_t step;
};

template <class Cell, bool add, int rows, int vectors>
KRNL_INLINE void multiply_block(const Left& a, const Right& b, int64_t k, const Sums& c, const float* factor) {
  Floats sum[rows][vectors];
  KRNL_UNROLL
  for (int i = 0; i < rows; i++)
    KRNL_UNROLL
    for (int j = 0; j < vectors; j++) {
      sum[i][j] = Floats{};
      if (add) __builtin_prefetch(c.cells + i * c.step + j * W);  // arrives while the products are formed
    }
  const float *left = a.cells, *right = b.cells;
  for (; k > 0; k--, left += a.step, right += b.step) {
    Floats row[vectors];
    KRNL_UNROLL
    for (int j = 0; j < vectors; j++) row[j] = load(right + j * W);
    KRNL_UNROLL
    for (int i = 0; i < rows; i++) {
      int32_t bits;  // not as a float: two bf16 may look like a signalling NaN
      std::memcpy(&bits, left + i * a.row, sizeof bits);
      const Floats cell = (Floats)(Ints{} + bits);
      KRNL_UNROLL
      for (int j = 0; j < vectors; j++) sum[i][j] = Cell::multiply_add(sum[i][j], cell, row[j]);
    }
  }
  KRNL_UNROLL
  for (int i = 0; i < rows; i++)
    KRNL_UNROLL
    for (int j = 0; j < vectors; j++) {
      float* to = c.cells + i * c.step + j * W;
      store(to, add ? load(to) * factor[i] + sum[i][j] : sum[i][j]);
    }
}

// Inlined, because most of the steps are constants where it is called.
template <class Cell, bool add, int most>
KRNL_INLINE void multiply_rows(int64_t rows, int64_t columns, int64_t k, Left a, Right b, Sums c, const float* factor) {
  if constexpr (most > 1)
    if (rows < most) return multiply_rows<Cell, add, most - 1>(rows, columns, k, a, b, c, factor);
  auto advance = [&](auto vectors) {
    multiply_block<Cell, add, most, decltype(vectors)::value>(a, b, k, c, factor);
    b.cells += vectors * W;
    c.cells += vectors * W;
    columns -= vectors * W;
  };
  while (columns >= kStripVectors * W) advance(std::integral_constant<int, kStripVectors>{});
  while (columns >= 2 * W) advance(std::integral_constant<int, 2>{});
  if (columns > 0) advance(std::integral_constant<int, 1>{});
}

// c = a b on up to kStrip rows and whole vectors of columns.
template <class Cell>
KRNL_INLINE void multiply_strip(int64_t rows, int64_t columns, int64_t k, const Left& a, const Right& b, const Sums& c) {
  multiply_rows<Cell, false, kStrip>(rows, columns, k, a, b, c, nullptr);
}
// c = factor ∘ c + a b, with a factor for each row.
template <class Cell>
KRNL_INLINE void multiply_strip(int64_t rows, int64_t columns, int64_t k, const Left& a, const Right& b, const Sums& c,
                                const float* factor) {
  multiply_rows<Cell, true, kStrip>(rows, columns, k, a, b, c, factor);
}

// Rows of a matrix as a left operand: `size` values each, to rows of cells_of(size) cells.
template <class Cell, class T>
void pack_left(const T* from, int64_t stride, int64_t rows, int64_t size, float* to) {
  const int64_t cells = cells_of<Cell>(size);
  for (int64_t i = 0; i < rows; i++) copy_cells<Cell>(from + i * stride, size, to + i * cells);
}

// The transpose of a matrix as a right operand, as in a product over `size`: row j becomes column j of `width`.
template <class Cell, class T>
void pack_transposed(const T* from, int64_t stride, int64_t rows, int64_t size, float* to, int64_t width) {
  for (int64_t j = 0; j < rows; j += W) {
    const Lanes lanes = {to + j, width};
    pack_along<Cell>(from + j * stride, stride, size, std::min<int64_t>(W, rows - j), &lanes);
  }
}

// A matrix as a right operand, as in a product over its rows: `size` columns, rounded up to whole vectors.
template <class Cell, class T>
void pack_right(const T* from, int64_t stride, int64_t rows, int64_t size, float* to) {
  const int64_t width = round_up(size, W);
  for (int64_t j = 0; j < size; j += W) {
    const Lanes lanes = {to + j, width};
    pack_across<Cell>(from + j, stride, rows, std::min<int64_t>(W, size - j), &lanes);
  }
}

// Hands out a thread's scratch memory.
class Scratch {
 public:
  Scratch(int thread, const char* kernel)
      : next_(static_cast<char*>(thread_scratch(thread))), left_(kThreadScratch), kernel_(kernel) {}

  float* take(int64_t count) {
    const int64_t bytes = round_up(count * int64_t{sizeof(float)}, 64);
    if (bytes > left_) {
      std::fprintf(stderr, "%s: heads this large do not fit the scratch memory of a thread (parallel.h)\n", kernel_);
      std::abort();
    }
    void* taken = next_;
    next_ += bytes;
    left_ -= bytes;
    return static_cast<float*>(taken);
  }

 private:
  char* next_;
  int64_t left_;
  const char* kernel_;
};

// The columns [first, last) of a tile that some row of a strip sees. Scores are computed in whole vectors, [begin, end).
struct Columns {
  int64_t first, last;

  bool any() const { return first < last; }
  int64_t begin() const { return first / W * W; }
  int64_t end() const { return round_up(last, W); }
};

// Calls body(T{}, Cell{}) with the type of activations and the cells in which this processor multiplies them best.
template <class Body>
void with_cells(Type type, const Body& body) {
  with_activation(type, [&](auto zero) { body(zero, CellOf<decltype(zero)>{}); });
}

}  // namespace krnl
