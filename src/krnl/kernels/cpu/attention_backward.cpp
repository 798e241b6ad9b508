// The gradient of attention, five products to a tile and no atomics.
//
// Queries and keys are cut into the same blocks. A tile (block of queries, block of keys) adds to the gradients of its
// queries and of its keys, so two tiles may run at once if they share neither. Tiles on one diagonal of the square never
// do: diagonal by diagonal, every sum is formed in the same order by any number of threads. Tiles that no query sees are
// skipped, and with them all diagonals behind the longest document.
#include <cmath>

#include "attention_tile.h"

namespace krnl {
namespace {

constexpr int64_t kBlock = 96;

struct Shape {
  int64_t live, heads, key_heads, size;

  int64_t share() const { return heads / key_heads; }
  int64_t width() const { return round_up(size, W); }
};

// Sums in fp32, [heads, live, width] or [key heads, live, width], and rowsum(dO ∘ O), [heads, live].
struct Gradients {
  float *dq, *dk, *dv, *delta;
};

template <class T>
struct Given {
  const T *d_out, *q, *k, *v;
  const float* lse;
  const int32_t* start;
  float scale;
};

// What a tile's rows see of its keys: query i sees [start[i] - key, i + 1 - key), cut to [0, keys).
Columns visible(const int32_t* start, int64_t query, int64_t queries, int64_t key, int64_t keys) {
  // start never decreases: the first query sees the earliest key, the last one the latest.
  return {std::max<int64_t>(start[query] - key, 0), std::min(query + queries - key, keys)};
}

// P = exp(scale S - lse) over `scores` and dS = P ∘ (dP - delta) scale over `slopes`, zero where column j is hidden.
inline void differentiate(float* scores, float* slopes, const Columns& columns, int64_t first, int64_t last, float scale, float lse, float delta) {
  const float log_scale = scale * kLog2e, log_total = lse * kLog2e;
  const bool whole = first <= columns.begin() && last >= columns.end();
  for (int64_t j = columns.begin(); j < columns.end(); j += W) {
    Floats p = exp2(load(scores + j) * log_scale - log_total);
    if (!whole) {
      const Ints column = lanes() + static_cast<int32_t>(j);
      p = select((column >= static_cast<int32_t>(first)) & (column < static_cast<int32_t>(last)), p, Floats{});
    }
    store(scores + j, p);
    store(slopes + j, p * (load(slopes + j) - delta) * scale);
  }
}

// A strip's rows become rows of cells, as the left operand of a product over the columns.
template <class Cell>
void along_columns(const float* rows, int64_t count, const Columns& columns, float* to) {
  for (int64_t i = 0; i < count; i++) {
    Element<Cell>* row = elements<Cell>(to + i * cells_of<Cell>(kBlock));
    for (int64_t j = columns.begin(); j < columns.end(); j += W) store(row + j, load(rows + i * kBlock + j));
  }
}

// A strip's rows, two to a row of cells if the cells are pairs, as the transposed left operand of a product over the rows.
template <class Cell>
void along_rows(const float* rows, int64_t count, const Columns& columns, float* to) {
  for (int64_t i = 0; i < count; i += Cell::depth, to += kBlock)
    for (int64_t j = columns.begin(); j < columns.end(); j += W)
      store(to + j, across<Cell>(rows + i * kBlock + j, kBlock, count - i, W));
}

template <class Cell, class T>
void differentiate_tile(const Shape& shape, const Given<T>& given, const Gradients& sums, int64_t head, int64_t query, int64_t key, Scratch& scratch) {
  const int64_t queries = std::min(kBlock, shape.live - query), keys = std::min(kBlock, shape.live - key);
  const int64_t size = shape.size, width = shape.width(), cells = cells_of<Cell>(size), block_cells = cells_of<Cell>(kBlock);
  const int64_t row = shape.heads * size, key_row = shape.key_heads * size;
  float* k_transposed = scratch.take(cells * kBlock);
  float* v_transposed = scratch.take(cells * kBlock);
  float* k_right = scratch.take(block_cells * width);
  float* q_left = scratch.take(kBlock * cells);
  float* q_right = scratch.take(block_cells * width);
  float* do_left = scratch.take(kBlock * cells);
  float* do_right = scratch.take(block_cells * width);
  float* p = scratch.take(kStrip * kBlock);
  float* ds = scratch.take(kStrip * kBlock);
  float* ds_left = scratch.take(kStrip * block_cells);
  float* p_columns = scratch.take(block_cells * kBlock);
  float* ds_columns = scratch.take(block_cells * kBlock);
  float ones[kStrip];
  std::fill_n(ones, kStrip, 1.0f);

  const T *k = given.k + key * key_row + head * size, *v = given.v + key * key_row + head * size;
  pack_transposed<Cell>(k, key_row, keys, size, k_transposed, kBlock);
  pack_transposed<Cell>(v, key_row, keys, size, v_transposed, kBlock);
  // Scores come in whole vectors: a zero in them must not meet values that are not there.
  std::fill_n(k_right, block_cells * width, 0.0f);
  pack_right<Cell>(k, key_row, keys, size, k_right);
  float *dk = sums.dk + (head * shape.live + key) * width, *dv = sums.dv + (head * shape.live + key) * width;

  for (int64_t h = head * shape.share(); h < (head + 1) * shape.share(); h++) {
    const T *q = given.q + query * row + h * size, *d_out = given.d_out + query * row + h * size;
    float* dq = sums.dq + (h * shape.live + query) * width;
    pack_left<Cell>(q, row, queries, size, q_left);
    pack_left<Cell>(d_out, row, queries, size, do_left);
    // From the copies, which are dense: rows of one head lie far apart.
    pack_right<Cell>(elements<Cell>(q_left), cells * Cell::depth, queries, size, q_right);
    pack_right<Cell>(elements<Cell>(do_left), cells * Cell::depth, queries, size, do_right);
    std::fill_n(p_columns, block_cells * kBlock, 0.0f);
    std::fill_n(ds_columns, block_cells * kBlock, 0.0f);

    for (int64_t i = 0; i < queries; i += kStrip) {
      const int64_t strip = std::min<int64_t>(kStrip, queries - i);
      const Columns columns = visible(given.start, query + i, strip, key, keys);
      if (!columns.any()) continue;
      const int64_t begin = columns.begin(), extent = columns.end() - begin, cell = begin / Cell::depth;
      multiply_strip<Cell>(strip, extent, cells, {q_left + i * cells, cells, 1}, {k_transposed + begin, kBlock}, {p + begin, kBlock}, nullptr);
      multiply_strip<Cell>(strip, extent, cells, {do_left + i * cells, cells, 1}, {v_transposed + begin, kBlock}, {ds + begin, kBlock}, nullptr);
      for (int64_t r = 0; r < strip; r++) {
        const int64_t at = query + i + r;
        differentiate(p + r * kBlock, ds + r * kBlock, columns, given.start[at] - key, at + 1 - key, given.scale, given.lse[at * shape.heads + h],
                      sums.delta[h * shape.live + at]);
      }
      along_rows<Cell>(p, strip, columns, p_columns + i / Cell::depth * kBlock);
      along_rows<Cell>(ds, strip, columns, ds_columns + i / Cell::depth * kBlock);
      along_columns<Cell>(ds, strip, columns, ds_left);
      multiply_strip<Cell>(strip, width, extent / Cell::depth, {ds_left + cell, block_cells, 1}, {k_right + cell * width, width},
                           {dq + i * width, width}, ones);
    }

    for (int64_t j = 0; j < keys; j += kStrip) {
      // Queries before the first of these keys do not see them, nor do those whose keys start behind the last.
      const int64_t strip = std::min<int64_t>(kStrip, keys - j), first = std::max<int64_t>(key + j - query, 0);
      const int32_t* starts = given.start + query;
      const int64_t last = std::lower_bound(starts, starts + queries, key + j + strip) - starts;
      if (first >= last) continue;
      const int64_t cell = first / Cell::depth, count = cells_of<Cell>(last) - cell;
      multiply_strip<Cell>(strip, width, count, {p_columns + cell * kBlock + j, 1, kBlock}, {do_right + cell * width, width},
                           {dv + j * width, width}, ones);
      multiply_strip<Cell>(strip, width, count, {ds_columns + cell * kBlock + j, 1, kBlock}, {q_right + cell * width, width},
                           {dk + j * width, width}, ones);
    }
  }
}

// delta[h, i] = Σ dO ∘ O over a head.
template <class T>
void row_sums(const Shape& shape, const T* d_out, const T* o, float* delta) {
  for_rows(shape.live, shape.heads * shape.size, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
      for (int64_t h = 0; h < shape.heads; h++) {
        const int64_t at = (i * shape.heads + h) * shape.size;
        Floats products = {};
        for_vectors(shape.size, [&](int64_t j, int64_t n) { products += load_some(d_out + at + j, n) * load_some(o + at + j, n); });
        delta[h * shape.live + i] = sum(products);
      }
  });
}

// sums [heads, live, width] -> to [live, heads, size].
template <class T>
void round_sums(const Shape& shape, int64_t heads, const float* sums, T* to) {
  for_rows(shape.live, heads * shape.size, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
      for (int64_t h = 0; h < heads; h++) convert(sums + (h * shape.live + i) * shape.width(), to + (i * heads + h) * shape.size, shape.size);
  });
}

void attention_backward(const Dispatch& d) {
  const Argument& q = d[1];
  const Shape shape = {d.live(7), q.shape[1], d[2].shape[1], q.shape[2]};
  const int64_t rows = shape.live * shape.heads, key_rows = shape.live * shape.key_heads, width = shape.width();
  Gradients sums;
  sums.dq = workspace<float>(d, rows * width + 2 * key_rows * width + rows, "attention_backward");
  sums.dk = sums.dq + rows * width;
  sums.dv = sums.dk + key_rows * width;
  sums.delta = sums.dv + key_rows * width;
  const int32_t* start = d[6].as<int32_t>();
  const int64_t blocks = (shape.live + kBlock - 1) / kBlock;
  with_cells(q.type, [&](auto zero, auto cell) {
    using T = decltype(zero);
    using Cell = decltype(cell);
    const Given<T> given = {d[0].as<T>(), q.as<T>(), d[2].as<T>(), d[3].as<T>(), d[5].as<float>(), start, static_cast<float>(d.attributes[0])};
    row_sums(shape, given.d_out, d[4].as<T>(), sums.delta);
    for_rows(rows + 2 * key_rows, width, [&](int64_t first, int64_t last) { std::fill(sums.dq + first * width, sums.dq + last * width, 0.0f); });

    for (int64_t diagonal = 0; diagonal < blocks; diagonal++) {
      auto seen = [&](int64_t block) { return start[(block + diagonal) * kBlock] < (block + 1) * kBlock; };
      bool any = false;
      for (int64_t block = 0; block + diagonal < blocks; block++) any = any || seen(block);
      if (!any) break;
      parallel_for((blocks - diagonal) * shape.key_heads, [&](int64_t piece, int thread) {
        const int64_t block = piece / shape.key_heads, head = piece % shape.key_heads;
        if (!seen(block)) return;
        Scratch scratch(thread, "attention_backward");
        differentiate_tile<Cell>(shape, given, sums, head, (block + diagonal) * kBlock, block * kBlock, scratch);
      });
    }
    round_sums(shape, shape.heads, sums.dq, d[8].as<T>());
    round_sums(shape, shape.key_heads, sums.dk, d[9].as<T>());
    round_sums(shape, shape.key_heads, sums.dv, d[10].as<T>());
  });
}

KRNL_KERNEL("attention_backward", attention_backward);

}  // namespace
}  // namespace krnl
