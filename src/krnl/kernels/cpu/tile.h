// The inner loop of a matrix product, and the description of products that it works on: sums of terms op(A) op(B).
#pragma once
#include "pack.h"
#include "rows.h"

namespace krnl {

// A tile must fit the registers together with a row of B and one value of A; the packed panels half of a core's L2.
#if defined(__AVX512F__)
constexpr int MR = 8, kTileVectors = 3;
constexpr int64_t kPanelBytes = 512 << 10;
#elif defined(__aarch64__)
constexpr int MR = 8, kTileVectors = 3;
constexpr int64_t kPanelBytes = 256 << 10;
#elif defined(__AVX__)
constexpr int MR = 6, kTileVectors = 2;
constexpr int64_t kPanelBytes = 256 << 10;
#else
constexpr int MR = 4, kTileVectors = 2;
constexpr int64_t kPanelBytes = 128 << 10;
#endif
constexpr int NR = kTileVectors * W;
constexpr int kTile = MR * NR;
constexpr int kPanels = kMaxLanes / kTileVectors;  // packed at once
constexpr int64_t kTileBytes = 1 << 20;            // of unfinished tiles, while K goes by in chunks
constexpr int kMembers = 8;                        // of a group
constexpr int kTerms = kMembers + 1;               // of a sum

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
// Where share `i` of `parts` nearly equal shares of `total` begins.
inline int64_t share(int64_t total, int64_t parts, int64_t i) { return total * i / parts; }

// One term op(A) op(B).
struct Term {
  Rows a;
  Weights b;
  int64_t k;
};

struct Sum {
  Term terms[kTerms];
  int count = 0;

  void add(const Term& term) {
    if (term.k > 0) terms[count++] = term;
  }
  template <class Cell>
  int64_t cells() const {
    int64_t total = 0;
    for (int i = 0; i < count; i++) total += cells_of<Cell>(terms[i].k);
    return total;
  }
};

// `parts` sums with the same rows and columns, whose tiles the epilogue sees together (gate and up).
template <int parts>
struct Product {
  Sum sums[parts];
  int64_t rows, columns;
};

// Up to MR rows of cells; a row that is missing stands for the last one, and its results are dropped.
struct Strip {
  const char* rows[MR];
  int64_t step, cells;
};

// The rows [row, row + MR) of `rows`, values [first, first + k), as a strip. Rows that are not made of cells are copied
// to `copy`, which moves on.
template <class T>
Strip strip_of(const Rows& a, int64_t first, int64_t k, int64_t row, int64_t rows, float*& copy) {
  using Cell = CellOf<T>;
  Strip strip = {{}, a.ready ? a.cell : int64_t{sizeof(float)}, cells_of<Cell>(k)};
  for (int i = 0; i < MR; i++) {
    const char* from = a.data + std::min(row + i, rows - 1) * a.row + first / Cell::depth * a.cell;
    if (a.ready) {
      strip.rows[i] = from;
    } else if (row + i < rows) {
      copy_cells<Cell>(reinterpret_cast<const T*>(from), k, copy);
      strip.rows[i] = reinterpret_cast<const char*>(copy);
      copy += strip.cells;
    } else {
      strip.rows[i] = reinterpret_cast<const char*>(copy - strip.cells);
    }
  }
  return strip;
}

inline Floats broadcast_cell(const char* p) {
  int32_t bits;  // not as a float: two bf16 may look like a signalling NaN
  std::memcpy(&bits, p, sizeof bits);
  return (Floats)(Ints{} + bits);
}

// tile (+)= strips · panel; the panel holds the cells of all strips, one after the other, `vectors` vectors each.
template <class Cell, int vectors>
void multiply_tile(const Strip* strips, int count, const float* panel, float* tile, bool resume) {
  constexpr int sums = vectors == 1 ? 2 : 1;  // per element: as many as it takes to hide the latency of an addition
  Floats sum[sums][MR][vectors];
  KRNL_UNROLL
  for (int i = 0; i < MR; i++)
    KRNL_UNROLL
    for (int j = 0; j < vectors; j++) {
      sum[sums - 1][i][j] = Floats{};
      sum[0][i][j] = resume ? load(tile + i * NR + j * W) : Floats{};
    }
  for (; count > 0; count--, strips++) {
    const char* rows[MR];
    KRNL_UNROLL
    for (int i = 0; i < MR; i++) rows[i] = strips->rows[i];
    const int64_t step = strips->step;
    int64_t offset = 0;
    auto advance = [&](int s) {
      Floats b[vectors];
      KRNL_UNROLL
      for (int j = 0; j < vectors; j++) b[j] = load(panel + j * W);
      KRNL_UNROLL
      for (int i = 0; i < MR; i++) {
        const Floats a = broadcast_cell(rows[i] + offset);
        KRNL_UNROLL
        for (int j = 0; j < vectors; j++) sum[s][i][j] = Cell::multiply_add(sum[s][i][j], a, b[j]);
      }
      panel += vectors * W;
      offset += step;
    };
    int64_t cells = strips->cells;
    for (; cells >= sums; cells -= sums)
      KRNL_UNROLL
      for (int s = 0; s < sums; s++) advance(s);
    if (cells > 0) advance(0);
  }
  KRNL_UNROLL
  for (int i = 0; i < MR; i++)
    KRNL_UNROLL
    for (int j = 0; j < vectors; j++) store(tile + i * NR + j * W, sums == 2 ? sum[0][i][j] + sum[1][i][j] : sum[0][i][j]);
}

template <class Cell>
void multiply_tile(const Strip* strips, int count, const float* panel, int vectors, float* tile, bool resume) {
  if (vectors == 1) multiply_tile<Cell, 1>(strips, count, panel, tile, resume);
  else if (kTileVectors == 2 || vectors == 2) multiply_tile<Cell, 2>(strips, count, panel, tile, resume);
  else multiply_tile<Cell, kTileVectors>(strips, count, panel, tile, resume);
}

// Calls epilogue(i, j, n, part's vector...) for the n <= W elements (i, j) ... (i, j + n - 1) at a time.
template <int parts, class Epilogue>
void finish_tile(const float* tile, int64_t part_stride, int64_t row, int64_t rows, int64_t column, int64_t columns,
                 const Epilogue& epilogue) {
  for (int64_t i = 0; i < rows; i++)
    for_vectors(columns, [&](int64_t j, int64_t n) {
      const float* at = tile + i * NR + j;
      if constexpr (parts == 1) epilogue(row + i, column + j, n, load(at));
      else epilogue(row + i, column + j, n, load(at), load(at + part_stride));
    });
}

}  // namespace krnl
