// Attention without the matrix of scores: a block of queries passes over the keys that it sees, tile by tile, and keeps
// for every row the largest score, the sum of exponentials relative to it, and the weighted sum of values so far
// (Milakov & Gimelshein 2018; Dao et al. 2022).
//
// The query heads that share a key head are treated together: row i * (h / g) + j of a block is query i, head j. So a
// tile of keys and values is packed once for all of them, and a generated token's heads share one pass over the cache.
#include <cmath>

#include "attention_tile.h"

namespace krnl {
namespace {

constexpr int64_t kBlockRows = 192;  // enough that packing a tile is little beside multiplying with it
constexpr int64_t kTileKeys = 128;   // a tile of keys and one of values stay in L1 with heads of 64
// A call with so few queries that they make one block has its keys cut into spans instead, as many as the cache has,
// to keep the threads busy. table.py knows both numbers.
constexpr int64_t kSpanKeys = 512;
constexpr int kStripLanes = (kStrip + W - 1) / W * W;
constexpr float kNoScore = -3e38f;   // below any score, and finite: the distance to a masked score, -inf, is well defined

struct Shape {
  int64_t queries, live, keys, heads, key_heads, size;

  int64_t share() const { return heads / key_heads; }
  int64_t width() const { return round_up(size, W); }
  int64_t block_queries() const { return std::max<int64_t>(1, kBlockRows / share()); }
  int64_t spans() const {
    return queries <= block_queries() ? std::max<int64_t>(1, (keys + kSpanKeys - 1) / kSpanKeys) : 1;
  }
};

// Rows of unfinished output: `width` weighted sums of values each, the largest score and the sum of exponentials.
struct Partial {
  float *sums, *top, *total;
};

// The part of a tile that some of the queries see.
Columns visible(const int32_t* start, const int32_t* stop, int64_t queries, int64_t key, int64_t keys) {
  Columns c = {keys, 0};
  for (int64_t i = 0; i < queries; i++) {
    const int64_t first = std::max<int64_t>(start[i] - key, 0), last = std::min<int64_t>(stop[i] - key, keys);
    if (first >= last) continue;
    c.first = std::min(c.first, first);
    c.last = std::max(c.last, last);
  }
  return c;
}

// The largest score of a row, scaled. Hidden columns get a score of minus infinity; [first, last) are visible.
inline float largest_score(float* score, const Columns& columns, int64_t first, int64_t last, float scale) {
  Floats top = broadcast(kNoScore);
  if (first <= columns.begin() && last >= columns.end()) {
    for (int64_t j = columns.begin(); j < columns.end(); j += W) top = max(load(score + j) * scale, top);
  } else {
    const Floats hidden = broadcast(-std::copysign(__builtin_inff(), scale));
    for (int64_t j = columns.begin(); j < columns.end(); j += W) {
      const Ints column = lanes() + static_cast<int32_t>(j);
      const Ints seen = (column >= static_cast<int32_t>(first)) & (column < static_cast<int32_t>(last));
      const Floats s = select(seen, load(score + j), hidden);
      top = max(s * scale, top);
      store(score + j, s);
    }
  }
  return largest(top);
}

// Scores become exponentials relative to `top`; returns their sum, lane by lane.
template <class E>
Floats exponentials(const float* score, E* p, const Columns& columns, float scale, float top) {
  Floats total = {};
  for (int64_t j = columns.begin(); j < columns.end(); j += W) {
    const Floats e = exp2(load(score + j) * scale - top);
    total += e;
    store(p + j, e);
  }
  return total;
}

// A block of queries, the heads of one key head; keys [first, last) of theirs. Pointers are to the block's own rows and
// heads. `scale` makes scores of products, in units of log 2.
template <class T>
struct Block {
  const T *q, *k, *v;
  const int32_t *start, *stop;
  int64_t queries, first, last;
  float scale;
};

template <class Cell, class T>
void attend(const Shape& shape, const Block<T>& block, const Partial& out, Scratch& scratch) {
  const int64_t share = shape.share(), rows = block.queries * share, size = shape.size, width = shape.width();
  const int64_t cells = cells_of<Cell>(size), tile_cells = cells_of<Cell>(kTileKeys), stride = shape.key_heads * size;
  float* left = scratch.take(rows * cells);
  float* keys = scratch.take(cells * kTileKeys);
  float* values = scratch.take(tile_cells * width);
  float* scores = scratch.take(kStrip * kTileKeys);
  float* weights = scratch.take(kStrip * tile_cells);
  float* totals = scratch.take(rows * W);  // lane by lane: added up at the end
  for (int64_t i = 0; i < block.queries; i++)
    pack_left<Cell>(block.q + i * shape.heads * size, size, share, size, left + i * share * cells);
  std::fill(out.sums, out.sums + rows * width, 0.0f);
  std::fill(out.top, out.top + rows, kNoScore);
  std::fill(totals, totals + rows * W, 0.0f);

  for (int64_t key = block.first; key < block.last; key += kTileKeys) {
    const int64_t count = std::min(kTileKeys, block.last - key);
    if (!visible(block.start, block.stop, block.queries, key, count).any()) continue;
    pack_transposed<Cell>(block.k + key * stride, stride, count, size, keys, kTileKeys);
    pack_right<Cell>(block.v + key * stride, stride, count, size, values);

    for (int64_t row = 0; row < rows; row += kStrip) {
      const int64_t strip = std::min<int64_t>(kStrip, rows - row);
      const int64_t query = row / share, queries = (row + strip - 1) / share - query + 1;
      const Columns columns = visible(block.start + query, block.stop + query, queries, key, count);
      if (!columns.any()) continue;
      const int64_t begin = columns.begin(), extent = columns.end() - begin;
      multiply_strip<Cell>(strip, extent, cells, {left + row * cells, cells, 1}, {keys + begin, kTileKeys},
                           {scores + begin, kTileKeys});

      alignas(64) float before[kStripLanes] = {}, top[kStripLanes] = {}, factor[kStripLanes];
      for (int64_t i = 0; i < strip; i++) {
        const int64_t at = (row + i) / share, first = block.start[at] - key, last = std::min<int64_t>(block.stop[at] - key, count);
        before[i] = out.top[row + i];
        top[i] = std::max(before[i], largest_score(scores + i * kTileKeys, columns, first, last, block.scale));
        out.top[row + i] = top[i];
      }
      for (int j = 0; j < kStripLanes; j += W) store(factor + j, exp2(load(before + j) - load(top + j)));
      for (int64_t i = 0; i < strip; i++) {
        float* total = totals + (row + i) * W;
        Element<Cell>* p = elements<Cell>(weights + i * tile_cells);
        store(total, load(total) * factor[i] + exponentials(scores + i * kTileKeys, p, columns, block.scale, top[i]));
      }

      const int64_t cell = columns.first / Cell::depth, weight_cells = cells_of<Cell>(columns.last) - cell;
      multiply_strip<Cell>(strip, width, weight_cells, {weights + cell, tile_cells, 1}, {values + cell * width, width},
                           {out.sums + row * width, width}, factor);
    }
  }
  for (int64_t row = 0; row < rows; row++) out.total[row] = sum(load(totals + row * W));
}

template <class T>
void finish_row(const float* sums, float top, float total, int64_t size, T* o, float* lse) {
  const float share = 1 / total;
  for_vectors(size, [&](int64_t j, int64_t n) { store_some(o + j, load(sums + j) * share, n); });
  *lse = static_cast<float>((top + std::log2(double(total))) / kLog2e);
}

// Puts the spans' sums of every row together.
template <class T>
void combine(const Shape& shape, const Partial& part, T* o, float* lse) {
  const int64_t rows = shape.live * shape.heads, width = shape.width(), spans = shape.spans();
  for_rows(rows, spans * width, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; row++) {
      float top = kNoScore, total = 0;
      for (int64_t s = 0; s < spans; s++) top = std::max(top, part.top[s * rows + row]);
      float* sums = part.sums + row * width;  // of the first span
      for (int64_t s = 0; s < spans; s++) {
        const float factor = exp2(broadcast(part.top[s * rows + row] - top))[0];
        total += factor * part.total[s * rows + row];
        const float* from = part.sums + (s * rows + row) * width;
        for (int64_t j = 0; j < width; j += W)
          store(sums + j, load(from + j) * factor + (s > 0 ? load(sums + j) : Floats{}));
      }
      finish_row(sums, top, total, shape.size, o + row * shape.size, lse + row);
    }
  });
}

template <class Cell, class T>
void attention_of(const Dispatch& d, const Shape& shape) {
  const int64_t block = shape.block_queries(), blocks = (shape.live + block - 1) / block, spans = shape.spans();
  const int64_t share = shape.share(), size = shape.size, width = shape.width(), all_rows = shape.live * shape.heads;
  T* const o = d[6].as<T>();
  float* const lse = d[7].as<float>();
  Partial parts = {};
  if (spans > 1) {
    parts.sums = workspace<float>(d, spans * all_rows * (width + 2), "attention");
    parts.top = parts.sums + spans * all_rows * width;
    parts.total = parts.top + spans * all_rows;
  }
  parallel_for(spans * blocks * shape.key_heads, [&](int64_t piece, int thread) {
    const int64_t head = piece % shape.key_heads, span = piece / shape.key_heads % spans;
    // Later blocks first: with causal attention they see more, and the small ones even out the end.
    const int64_t query = (blocks - 1 - piece / shape.key_heads / spans) * block;
    Block<T> b;
    b.q = d[0].as<T>() + (query * shape.heads + head * share) * size;
    b.k = d[1].as<T>() + head * size;
    b.v = d[2].as<T>() + head * size;
    b.start = d[3].as<int32_t>() + query;
    b.stop = d[4].as<int32_t>() + query;
    b.queries = std::min(block, shape.live - query);
    b.first = *std::min_element(b.start, b.start + b.queries);
    b.last = *std::max_element(b.stop, b.stop + b.queries);
    if (spans > 1) {
      b.first = std::max(b.first, span * kSpanKeys);
      b.last = std::min(b.last, (span + 1) * kSpanKeys);
    }
    b.scale = static_cast<float>(d.attributes[0] * kLog2e);

    Scratch scratch(thread, "attention");
    const int64_t rows = b.queries * share;
    const Partial part = {scratch.take(rows * width), scratch.take(rows), scratch.take(rows)};
    attend<Cell>(shape, b, part, scratch);
    for (int64_t row = 0; row < rows; row++) {
      const float* sums = part.sums + row * width;
      const int64_t at = (query + row / share) * shape.heads + head * share + row % share, to = span * all_rows + at;
      if (spans == 1) {
        finish_row(sums, part.top[row], part.total[row], size, o + at * size, lse + at);
      } else {
        std::copy_n(sums, width, parts.sums + to * width);
        parts.top[to] = part.top[row];
        parts.total[to] = part.total[row];
      }
    }
  });
  if (spans > 1) combine(shape, parts, o, lse);
}

void attention(const Dispatch& d) {
  const Argument &q = d[0], &k = d[1];
  const Shape shape = {q.shape[0], d.live(5), k.shape[0], q.shape[1], k.shape[1], q.shape[2]};
  with_cells(q.type, [&](auto zero, auto cell) { attention_of<decltype(cell), decltype(zero)>(d, shape); });
}

void cache_write(const Dispatch& d) {
  const int32_t* row = d[1].as<int32_t>();
  const int64_t width = d[0].shape[1] * d[0].shape[2];
  with_activation(d[0].type, [&](auto zero) {
    using T = decltype(zero);
    for_rows(d.live(2), width, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) convert(d[0].as<T>() + i * width, d[3].as<T>() + row[i] * width, width);
    });
  });
}

KRNL_KERNEL("attention", attention);
KRNL_KERNEL("cache_write", cache_write);

}  // namespace
}  // namespace krnl
