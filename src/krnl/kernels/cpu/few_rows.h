// Products of a few rows (generation): memory is the limit, so the weights are read once, along k, and nothing is packed.
#pragma once
#include "tile.h"

namespace krnl {

constexpr int64_t kFewRows = 16;

// Whether a product is done here: all its rows must fit the scratch as cells.
template <class Cell, int parts>
bool is_few(const Product<parts>& product) {
  int64_t cells = 0;
  for (const Sum& sum : product.sums) cells += sum.cells<Cell>();
  const int64_t bytes = product.rows * cells * int64_t{sizeof(float)};
  return product.rows <= kFewRows && product.sums[0].terms[0].b.along && bytes <= kThreadScratch;
}

// Adds to sum[r][i] the products of x's row r and the i-th of W columns, W cells at a time: the total is the sum over
// the vector. A column that is missing stands for the last one, and its results are dropped.
template <class Cell, int rows, class T>
void multiply_columns(const char* const* x, const T* w, int64_t stride, int64_t columns, int64_t k, Floats (*sum)[W]) {
  constexpr int group = W < 8 ? W : 8, whole = W * Cell::depth;
  for (int g = 0; g < W; g += group) {
    const T* column[group];
    for (int i = 0; i < group; i++) column[i] = w + std::min<int64_t>(g + i, columns - 1) * stride;
    Floats t[rows][group];
    KRNL_UNROLL
    for (int r = 0; r < rows; r++)
      KRNL_UNROLL
      for (int i = 0; i < group; i++) t[r][i] = sum[r][g + i];
    auto advance = [&](int64_t at, int64_t left) {
      Floats a[rows];
      KRNL_UNROLL
      for (int r = 0; r < rows; r++) a[r] = load_some(reinterpret_cast<const float*>(x[r]) + at / Cell::depth, cells_of<Cell>(left));
      KRNL_UNROLL
      for (int i = 0; i < group; i++) {
        const Floats b = along<Cell>(column[i] + at, left);
        KRNL_UNROLL
        for (int r = 0; r < rows; r++) t[r][i] = Cell::multiply_add(t[r][i], a[r], b);
      }
    };
    int64_t at = 0;
    for (; at + whole <= k; at += whole) advance(at, whole);
    if (at < k) advance(at, k - at);
    KRNL_UNROLL
    for (int r = 0; r < rows; r++)
      KRNL_UNROLL
      for (int i = 0; i < group; i++) sum[r][g + i] = t[r][i];
  }
}

// Pieces that a product is cut into: more than threads, since memory may serve one of them better than another.
inline int64_t few_rows_pieces(int64_t columns, int64_t threads) { return std::min(ceil_div(columns, W), threads == 1 ? 1 : 4 * threads); }

// Piece `index` of a product whose weights all lie along k: W columns of them at a time meet all rows, two by two.
template <class T, int parts, class Epilogue>
void multiply_few_rows(const Product<parts>& product, int64_t index, int64_t pieces, float* scratch, const Epilogue& epilogue) {
  using Cell = CellOf<T>;
  const int64_t rows = product.rows;
  const char* x[parts][kTerms][kFewRows + MR];
  for (int p = 0; p < parts; p++)
    for (int t = 0; t < product.sums[p].count; t++)
      for (int64_t row = 0; row < rows; row += MR) {
        const Term& term = product.sums[p].terms[t];
        const Strip strip = strip_of<T>(term.a, 0, term.k, row, rows, scratch);
        std::copy_n(strip.rows, MR, x[p][t] + row);
      }
  const int64_t vectors = ceil_div(product.columns, W), end = std::min(W * share(vectors, pieces, index + 1), product.columns);
  for (int64_t column = W * share(vectors, pieces, index); column < end; column += W) {
    const int64_t columns = std::min<int64_t>(W, product.columns - column);
    for (int64_t row = 0; row < rows; row += 2) {
      const int count = row + 1 < rows ? 2 : 1;
      alignas(64) float tiles[parts][kTile];
      for (int p = 0; p < parts; p++) {
        Floats sum[2][W] = {};
        for (int t = 0; t < product.sums[p].count; t++) {
          const Term& term = product.sums[p].terms[t];
          with_elements(term.b, [&](auto* w) {
            w += column * term.b.stride;
            if (count == 2) multiply_columns<Cell, 2>(x[p][t] + row, w, term.b.stride, columns, term.k, sum);
            else multiply_columns<Cell, 1>(x[p][t] + row, w, term.b.stride, columns, term.k, sum);
          });
        }
        for (int r = 0; r < count; r++) {
          transpose(sum[r]);
          Floats total = sum[r][0];
          for (int i = 1; i < W; i++) total += sum[r][i];
          store(tiles[p] + r * NR, total);
        }
      }
      finish_tile<parts>(tiles[0], kTile, row, count, column, columns, epilogue);
    }
  }
}

}  // namespace krnl
