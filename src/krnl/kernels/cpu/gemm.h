// Matrix products for the layers in linear.cpp: sums of products whose K loop runs on from one term to the next, with
// whatever follows (bias, residual, SwiGLU, ...) done to a tile while it is in the nearest cache.
//
// C is cut into tiles of MR rows (a strip) and up to NR columns (a panel), which stay in registers. A thread packs the
// weights of a few panels into its own memory, as much of K as its cache holds, and passes over the strips with them:
// weights are read once from where they lie, and the left-hand operand needs no packing, since one value of it at a time
// is broadcast. (Goto and van de Geijn 2008, without their copy of A.) The order in which an element of C is added up
// depends on the sizes alone, so results do not depend on the number of threads.
#pragma once
#include "few_rows.h"
#include "tile.h"

namespace krnl {

// How a product is cut. The vectors of its columns are dealt out evenly to panels; a piece of work is the tiles of some
// panels (a column block) and some strips (a row block), for which K goes by in chunks.
struct Blocking {
  int64_t vectors, panels, strips, column_blocks, row_blocks, chunks;

  int64_t pieces() const { return column_blocks * row_blocks; }
  int64_t panel_begin(int64_t panel) const { return W * share(vectors, panels, panel); }
};

// Takes the cut with the least work for the busiest of `threads` threads, counted in tiles of pieces of average size
// (they differ by one panel at most). Reading a strip's rows costs a twentieth of a tile, packing a panel two, more where few panels leave only short stretches of memory to read at a
// time; and as threads are never equally fast, the last piece is waited for. K is cut so that two panels fit, whatever the
// number of threads: where K is cut may matter to the last bit.
template <class Cell, int parts>
Blocking choose_blocking(const Product<parts>& product, int64_t threads) {
  Blocking b = {};
  b.vectors = ceil_div(product.columns, W);
  b.panels = ceil_div(b.vectors, kTileVectors);
  b.strips = ceil_div(product.rows, MR);
  const double short_stretches = product.sums[0].terms[0].b.along ? 0.5 : 3;
  const int64_t room = kPanelBytes / (int64_t{sizeof(float)} * NR * parts);
  int64_t cells = 0;
  for (const Sum& sum : product.sums) cells = std::max(cells, sum.template cells<Cell>());
  b.chunks = std::max<int64_t>(1, ceil_div(cells * std::min<int64_t>(2, b.panels), room));
  double least = 0;
  for (int64_t column_blocks = ceil_div(b.panels, kPanels); column_blocks <= b.panels; column_blocks++) {
    const int64_t together = ceil_div(b.panels, column_blocks);
    if (together > 2 && ceil_div(cells, b.chunks) * together > room) continue;
    const int64_t most_strips = b.chunks == 1 ? b.strips : kTileBytes / (int64_t{sizeof(float)} * kTile * together * parts);
    const int64_t fewest = ceil_div(b.strips, most_strips);
    const int64_t most = std::max(fewest, std::min(b.strips, ceil_div(2 * threads, column_blocks)));
    for (int64_t row_blocks = fewest; row_blocks <= most; row_blocks++) {
      const double strips = static_cast<double>(ceil_div(b.strips, row_blocks));
      const double panels = static_cast<double>(b.panels) / static_cast<double>(column_blocks);
      const double piece = strips * (panels + 0.05) + 2 * panels + short_stretches;
      const double work = piece * (static_cast<double>(ceil_div(column_blocks * row_blocks, threads)) + 0.1);
      if (least > 0 && work >= least) continue;
      least = work;
      b.column_blocks = column_blocks;
      b.row_blocks = row_blocks;
    }
  }
  return b;
}

// One piece of work. Scratch holds the tiles (of all strips, if they must wait for more chunks), the packed panels, and
// copies of rows that are not made of cells.
template <class T, int parts>
class Block {
  using Cell = CellOf<T>;

 public:
  Block(const Product<parts>& product, const Blocking& blocking, int64_t index, float* scratch)
      : product_(product), chunks_(blocking.chunks) {
    const int64_t column_block = index / blocking.row_blocks, row_block = index % blocking.row_blocks;
    first_strip_ = share(blocking.strips, blocking.row_blocks, row_block);
    last_strip_ = share(blocking.strips, blocking.row_blocks, row_block + 1);
    const int64_t first = share(blocking.panels, blocking.column_blocks, column_block);
    panels_ = static_cast<int>(share(blocking.panels, blocking.column_blocks, column_block + 1) - first);
    for (int q = 0; q <= panels_; q++) begin_[q] = blocking.panel_begin(first + q);
    tiles_ = scratch;
    packed_ = tiles_ + (chunks_ == 1 ? 1 : last_strip_ - first_strip_) * parts * panels_ * kTile;
  }

  template <class Epilogue>
  void run(const Epilogue& epilogue) {
    for (int64_t chunk = 0; chunk < chunks_; chunk++) {
      pack_chunk(chunk);
      for (int64_t strip = first_strip_; strip < last_strip_; strip++) {
        float* tiles = tiles_ + (chunks_ == 1 ? 0 : strip - first_strip_) * parts * panels_ * kTile;
        multiply_strip(strip * MR, tiles, chunk > 0);
        if (chunk + 1 == chunks_) finish_strip(strip * MR, tiles, epilogue);
      }
    }
  }

 private:
  // The values [first, first + k) of a term.
  struct Range {
    const Term* term;
    int64_t first, k;
  };

  // What lies of a sum in cells [first, last), counted through all its terms.
  static int ranges(const Sum& sum, int64_t first, int64_t last, Range* found) {
    int count = 0;
    for (int i = 0; i < sum.count; i++) {
      const Term& term = sum.terms[i];
      const int64_t cells = cells_of<Cell>(term.k), from = std::max<int64_t>(first, 0), to = std::min(last, cells);
      if (from < to) found[count++] = {&term, from * Cell::depth, std::min(to * Cell::depth, term.k) - from * Cell::depth};
      first -= cells;
      last -= cells;
    }
    return count;
  }

  void pack_chunk(int64_t chunk) {
    float* free = packed_;
    for (int p = 0; p < parts; p++) {
      const int64_t total = product_.sums[p].template cells<Cell>();
      const int64_t first = share(total, chunks_, chunk), last = share(total, chunks_, chunk + 1);
      Lanes lanes[kMaxLanes];
      int lane_count = 0;
      for (int q = 0; q < panels_; q++) {
        const int64_t width = begin_[q + 1] - begin_[q];
        panel_[p][q] = free;
        for (int64_t v = 0; v < width; v += W) lanes[lane_count++] = {free + v, width};
        free += width * (last - first);
      }
      range_count_[p] = ranges(product_.sums[p], first, last, ranges_[p]);
      for (int r = 0; r < range_count_[p]; r++) {
        const Range& range = ranges_[p][r];
        pack<Cell>(range.term->b, range.first, range.k, begin_[0], std::min(begin_[panels_], product_.columns) - begin_[0], lanes);
        for (int v = 0; v < lane_count; v++) lanes[v].cells += cells_of<Cell>(range.k) * lanes[v].stride;
      }
    }
    copies_ = free;
  }

  void multiply_strip(int64_t row, float* tiles, bool resume) {
    for (int p = 0; p < parts; p++) {
      Strip strips[kTerms];
      float* copy = copies_;
      for (int r = 0; r < range_count_[p]; r++) {
        const Range& range = ranges_[p][r];
        strips[r] = strip_of<T>(range.term->a, range.first, range.k, row, product_.rows, copy);
      }
      for (int q = 0; q < panels_; q++) {
        const int vectors = static_cast<int>((begin_[q + 1] - begin_[q]) / W);
        multiply_tile<Cell>(strips, range_count_[p], panel_[p][q], vectors, tiles + (q * parts + p) * kTile, resume);
      }
    }
  }

  template <class Epilogue>
  void finish_strip(int64_t row, const float* tiles, const Epilogue& epilogue) {
    for (int q = 0; q < panels_; q++) {
      const int64_t columns = std::min(begin_[q + 1], product_.columns) - begin_[q];
      finish_tile<parts>(tiles + q * parts * kTile, kTile, row, std::min<int64_t>(MR, product_.rows - row), begin_[q], columns, epilogue);
    }
  }

  const Product<parts>& product_;
  int64_t chunks_, first_strip_, last_strip_;
  int panels_, range_count_[parts];
  int64_t begin_[kPanels + 1];  // each panel's first column
  float *tiles_, *packed_, *copies_;
  const float* panel_[parts][kPanels];
  Range ranges_[parts][kTerms];
};

// Computes `members` products of activations of type T, and hands each element over: epilogue(member, i, j, n, vectors...)
// gets the n <= W elements from (i, j) on, one vector for each part.
template <class T, int parts, class Epilogue>
void multiply(const Product<parts>* products, int members, const Epilogue& epilogue) {
  using Cell = CellOf<T>;
  int64_t elements = 0;
  for (int m = 0; m < members; m++) elements += products[m].rows * products[m].columns;
  if (elements == 0) return;
  bool few[kMembers] = {};
  Blocking blocking[kMembers] = {};
  int64_t pieces[kMembers] = {}, total = 0;
  for (int m = 0; m < members; m++) {
    const Product<parts>& product = products[m];
    if (product.rows == 0 || product.columns == 0) continue;
    const int64_t threads = ceil_div(thread_count() * product.rows * product.columns, elements);
    few[m] = is_few<Cell>(product);
    if (!few[m]) blocking[m] = choose_blocking<Cell>(product, threads);
    total += pieces[m] = few[m] ? few_rows_pieces(product.columns, threads) : blocking[m].pieces();
  }
  parallel_for(total, [&](int64_t index, int thread) {
    int m = 0;
    while (index >= pieces[m]) index -= pieces[m++];
    float* scratch = static_cast<float*>(thread_scratch(thread));
    auto finish = [&](auto... values) { epilogue(m, values...); };
    if (few[m]) multiply_few_rows<T>(products[m], index, pieces[m], scratch, finish);
    else Block<T, parts>(products[m], blocking[m], index, scratch).run(finish);
  });
}

}  // namespace krnl
