// The gradient of attention: five products to a tile, none of them done twice, and no atomics.
//
// Queries and keys are cut into the same blocks. A tile (block of queries, block of keys) adds to the gradients of its
// queries and of its keys, so two tiles may run at once if they share neither. Tiles on one diagonal of the square never
// do: diagonal by diagonal, every sum is formed in the same order by any number of threads. Tiles of which no query sees
// a key are skipped, and with them all diagonals beyond the longest document.
#include "attention_tile.h"

namespace krnl {
namespace {

constexpr int64_t kBlock = 96;  // whole strips; sums pass through memory once for this many keys or queries

struct Shape {
  int64_t live, heads, key_heads, size;

  int64_t share() const { return heads / key_heads; }
  int64_t width() const { return round_up(size, W); }
};

template <class T>
struct Given {
  const T *d_out, *q, *k, *v;
  const float* lse;
  const int32_t* start;
  float scale;
};

// Sums in fp32, [heads, live, width] or [key heads, live, width], and delta = rowsum(dO ∘ O), [heads, live].
struct Gradients {
  float *dq, *dk, *dv, *delta;
};

// A tile's operands, and P and dS twice: as the strip in work, and as the left operands of products over the queries.
template <class Cell>
struct Tile {
  int64_t query, queries, key, keys;
  int64_t cells, width;  // of a row as a left operand; of sums and right operands
  float *k_transposed, *v_transposed, *k_right;
  float *q_left, *q_right, *do_left, *do_right;
  float *p, *ds, *ds_left, *p_columns, *ds_columns;

  static constexpr int64_t kCells = kBlock / Cell::depth;  // of kBlock values

  Tile(const Shape& shape, int64_t query, int64_t key, Scratch& scratch)
      : query(query), queries(std::min(kBlock, shape.live - query)), key(key), keys(std::min(kBlock, shape.live - key)),
        cells(cells_of<Cell>(shape.size)), width(shape.width()) {
    for (float** left : {&k_transposed, &v_transposed, &q_left, &do_left}) *left = scratch.take(kBlock * cells);
    for (float** right : {&k_right, &q_right, &do_right}) *right = scratch.take(kCells * width);
    for (float** strip : {&p, &ds}) *strip = scratch.take(kStrip * kBlock);
    ds_left = scratch.take(kStrip * kCells);
    for (float** columns : {&p_columns, &ds_columns}) *columns = scratch.take(kCells * kBlock);
  }
};

// What the sums so far are multiplied by before a product is added to them.
constexpr float kAdd[kStrip] = {1, 1, 1, 1, 1, 1};

// The keys of a tile that `queries` queries see. As start never decreases, the first query sees the earliest key.
Columns visible(const int32_t* start, int64_t query, int64_t queries, int64_t key, int64_t keys) {
  return {std::max<int64_t>(start[query] - key, 0), std::min(query + queries - key, keys)};
}

// P = exp(scale S - lse) over the scores S and dS = P ∘ (dP - delta) scale over dP, of one row that sees [first, last).
inline void differentiate(float* p, float* ds, const Columns& columns, int64_t first, int64_t last, float scale, float lse,
                          float delta) {
  const float log_scale = scale * kLog2e, log_total = lse * kLog2e;
  const bool whole = first <= columns.begin() && last >= columns.end();
  for (int64_t j = columns.begin(); j < columns.end(); j += W) {
    Floats e = exp2(load(p + j) * log_scale - log_total);
    if (!whole) {
      const Ints column = lanes() + static_cast<int32_t>(j);
      const Ints seen = (column >= static_cast<int32_t>(first)) & (column < static_cast<int32_t>(last));
      e = select(seen, e, Floats{});
    }
    store(p + j, e);
    store(ds + j, e * (load(ds + j) - delta) * scale);
  }
}

// A strip's rows become rows of cells, the left operand of a product over the keys.
template <class Cell>
void cells_along(const float* strip, int64_t rows, const Columns& columns, float* to) {
  for (int64_t i = 0; i < rows; i++) {
    Element<Cell>* row = elements<Cell>(to + i * Tile<Cell>::kCells);
    for (int64_t j = columns.begin(); j < columns.end(); j += W) store(row + j, load(strip + i * kBlock + j));
  }
}

// A strip's rows, `depth` to a row of cells, the left operand (transposed) of a product over the queries.
template <class Cell>
void cells_across(const float* strip, int64_t rows, const Columns& columns, float* to) {
  for (int64_t i = 0; i < rows; i += Cell::depth, to += kBlock)
    for (int64_t j = columns.begin(); j < columns.end(); j += W)
      store(to + j, across<Cell>(strip + i * kBlock + j, kBlock, rows - i, W));
}

// P and dS of one head, strip by strip of queries, and dQ += dS K.
template <class Cell, class T>
void visit_queries(const Shape& shape, const Given<T>& given, const float* delta, int64_t head, const Tile<Cell>& t, float* dq) {
  const int64_t cells = t.cells, width = t.width;
  std::fill_n(t.p_columns, t.kCells * kBlock, 0.0f);
  std::fill_n(t.ds_columns, t.kCells * kBlock, 0.0f);
  for (int64_t i = 0; i < t.queries; i += kStrip) {
    const int64_t strip = std::min<int64_t>(kStrip, t.queries - i), query = t.query + i;
    const Columns columns = visible(given.start, query, strip, t.key, t.keys);
    if (!columns.any()) continue;
    const int64_t begin = columns.begin(), extent = columns.end() - begin;
    const Left q = {t.q_left + i * cells, cells, 1}, d_out = {t.do_left + i * cells, cells, 1};
    multiply_strip<Cell>(strip, extent, cells, q, {t.k_transposed + begin, kBlock}, {t.p + begin, kBlock});
    multiply_strip<Cell>(strip, extent, cells, d_out, {t.v_transposed + begin, kBlock}, {t.ds + begin, kBlock});
    for (int64_t r = 0; r < strip; r++) {
      const int64_t at = query + r, first = given.start[at] - t.key, last = at + 1 - t.key;
      const float lse = given.lse[at * shape.heads + head];
      differentiate(t.p + r * kBlock, t.ds + r * kBlock, columns, first, last, given.scale, lse, delta[head * shape.live + at]);
    }
    cells_across<Cell>(t.p, strip, columns, t.p_columns + i / Cell::depth * kBlock);
    cells_across<Cell>(t.ds, strip, columns, t.ds_columns + i / Cell::depth * kBlock);
    cells_along<Cell>(t.ds, strip, columns, t.ds_left);
    const int64_t cell = columns.first / Cell::depth, count = cells_of<Cell>(columns.last) - cell;
    multiply_strip<Cell>(strip, width, count, {t.ds_left + cell, t.kCells, 1}, {t.k_right + cell * width, width},
                         {dq + i * width, width}, kAdd);
  }
}

// dV += Pᵀ dO and dK += dSᵀ Q, strip by strip of keys.
template <class Cell>
void visit_keys(const int32_t* start, const Tile<Cell>& t, float* dk, float* dv) {
  const int64_t width = t.width;
  for (int64_t j = 0; j < t.keys; j += kStrip) {
    // Queries before the first of these keys do not see them, nor do those whose keys begin behind the last.
    const int64_t strip = std::min<int64_t>(kStrip, t.keys - j), first = std::max<int64_t>(t.key + j - t.query, 0);
    const int64_t last = std::lower_bound(start + t.query, start + t.query + t.queries, t.key + j + strip) - (start + t.query);
    if (first >= last) continue;
    const int64_t cell = first / Cell::depth, count = cells_of<Cell>(last) - cell, at = cell * kBlock + j;
    const Right d_out = {t.do_right + cell * width, width}, q = {t.q_right + cell * width, width};
    multiply_strip<Cell>(strip, width, count, {t.p_columns + at, 1, kBlock}, d_out, {dv + j * width, width}, kAdd);
    multiply_strip<Cell>(strip, width, count, {t.ds_columns + at, 1, kBlock}, q, {dk + j * width, width}, kAdd);
  }
}

// The tile of all heads that share a key head.
template <class Cell, class T>
void differentiate_tile(const Shape& shape, const Given<T>& given, const Gradients& sums, int64_t key_head, const Tile<Cell>& t) {
  const int64_t size = shape.size, row = shape.heads * size, key_row = shape.key_heads * size;
  const T *k = given.k + t.key * key_row + key_head * size, *v = given.v + t.key * key_row + key_head * size;
  pack_transposed<Cell>(k, key_row, t.keys, size, t.k_transposed, kBlock);
  pack_transposed<Cell>(v, key_row, t.keys, size, t.v_transposed, kBlock);
  pack_right<Cell>(k, key_row, t.keys, size, t.k_right);
  const bool first_diagonal = t.query == t.key;  // where every query and key is met for the first time
  const int64_t first_head = key_head * shape.share(), key_at = (key_head * shape.live + t.key) * t.width;
  float *dk = sums.dk + key_at, *dv = sums.dv + key_at;
  if (first_diagonal)
    for (float* sum : {dk, dv}) std::fill_n(sum, t.keys * t.width, 0.0f);
  for (int64_t head = first_head; head < first_head + shape.share(); head++) {
    const int64_t at = t.query * row + head * size;
    pack_left<Cell>(given.q + at, row, t.queries, size, t.q_left);
    pack_left<Cell>(given.d_out + at, row, t.queries, size, t.do_left);
    // From the copies, which are dense: the rows of one head lie far apart.
    pack_right<Cell>(elements<Cell>(t.q_left), t.cells * Cell::depth, t.queries, size, t.q_right);
    pack_right<Cell>(elements<Cell>(t.do_left), t.cells * Cell::depth, t.queries, size, t.do_right);
    float* dq = sums.dq + (head * shape.live + t.query) * t.width;
    if (first_diagonal) std::fill_n(dq, t.queries * t.width, 0.0f);
    visit_queries(shape, given, sums.delta, head, t, dq);
    visit_keys(given.start, t, dk, dv);
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
        for_vectors(shape.size, [&](int64_t j, int64_t n) {
          products += load_some(d_out + at + j, n) * load_some(o + at + j, n);
        });
        delta[h * shape.live + i] = sum(products);
      }
  });
}

// sums [heads, live, width] -> to [live, heads, size].
template <class T>
void round_sums(const Shape& shape, int64_t heads, const float* sums, T* to) {
  const int64_t size = shape.size;
  for_rows(shape.live, heads * size, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
      for (int64_t h = 0; h < heads; h++)
        convert(sums + (h * shape.live + i) * shape.width(), to + (i * heads + h) * size, size);
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
    const Given<T> given = {d[0].as<T>(), q.as<T>(), d[2].as<T>(), d[3].as<T>(), d[5].as<float>(), start,
                            static_cast<float>(d.attributes[0])};
    row_sums(shape, given.d_out, d[4].as<T>(), sums.delta);
    for (int64_t diagonal = 0; diagonal < blocks; diagonal++) {
      auto seen = [&](int64_t block) { return start[(block + diagonal) * kBlock] < (block + 1) * kBlock; };
      bool any = false;
      for (int64_t block = 0; block + diagonal < blocks; block++) any = any || seen(block);
      if (!any) break;
      parallel_for((blocks - diagonal) * shape.key_heads, [&](int64_t piece, int thread) {
        const int64_t block = piece / shape.key_heads, key_head = piece % shape.key_heads;
        if (!seen(block)) return;
        Scratch scratch(thread, "attention_backward");
        const Tile<Cell> tile(shape, (block + diagonal) * kBlock, block * kBlock, scratch);
        differentiate_tile(shape, given, sums, key_head, tile);
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
