// Attention with its scores in memory, as section 8 of the report has it: per head six products, and a softmax.
//
//   S = Q Kᵀ          P = softmax(scale S)      O = P V
//   dP = dO Vᵀ        dS = P ∘ (dP - rowsum(dO ∘ O)) scale
//   dQ = dS K         dK = dSᵀ Q                dV = Pᵀ dO
//
// q, o and their gradients are [n, h, d]: a head is a matrix whose rows lie h·d elements apart, and that is all a
// product has to know. Storing heads one after the other, as the report did, would transpose every tensor twice.
//
// A grid covers some heads and some rows of the scores (`Part`). They lie in a workspace that is padded to whole tiles.
// Of a tile of 32 rows there are the keys from the first to the last that any of its rows sees; tiles of scores outside
// are neither computed nor read.
#include "gemm.h"

// Without it, a query sees the keys up to itself.
constant bool has_stop [[function_constant(0)]];
// All rows of [n, h, d] and [m, g, d] begin at multiples of four elements.
constant bool aligned [[function_constant(1)]];
// The sums over keys are cut into spans, whose partial sums are added by another launch.
constant bool has_spans [[function_constant(2)]];
// Rows come in several parts, and sums over rows are carried from one to the next.
constant bool has_carried [[function_constant(3)]];

struct Part {
  uint row_heads, head_heads;  // from a row to the next, and from a head to the next: steps in [n, h], and d times in q
  uint rows_per_query;         // 1, or as many heads as share a key head: these are rows then, and a head is a key head
  uint heads_per_key;          // heads that read one key head
  uint key_heads, size;        // g, d
  uint first_head, heads;      // of this part; elsewhere `head` counts from its first one
  uint first_row, rows;        // whole tiles; `row` counts all rows
  uint columns;                // of a row of scores, whole tiles
  uint span;                   // keys, whole tiles
  uint last;                   // whether this part ends the rows of its heads
  float scale;
};

METAL_FUNC uint live_rows(device const int *live, constant Part &part) { return uint(live[0]) * part.rows_per_query; }

// Index in [n, h]; times d, it is where a row of a head begins in [n, h, d].
METAL_FUNC ulong place(constant Part &part, uint row, uint head) {
  return ulong(row) * part.row_heads + (part.first_head + head) * part.head_heads;
}

METAL_FUNC uint row_stride(constant Part &part) { return part.row_heads * part.size; }
METAL_FUNC uint key_stride(constant Part &part) { return part.key_heads * part.size; }

// Where the key or value that a head reads begins in [m, g, d].
METAL_FUNC ulong key_place(constant Part &part, uint key, uint head) {
  return ulong(key) * key_stride(part) + (part.first_head + head) / part.heads_per_key * part.size;
}

// Where a row of a head begins in the workspace.
METAL_FUNC uint score_place(constant Part &part, uint row, uint head) {
  return (head * part.rows + row - part.first_row) * part.columns;
}

METAL_FUNC uint stop_of(device const int *stop, uint query) { return has_stop ? uint(stop[query]) : query + 1; }

struct Keys {
  uint first, stop;
};

// The keys from the first to the last that live rows of the tile at `row` see. Whole simdgroups call it, for one tile.
METAL_FUNC Keys seen_by_tile(device const int *start, device const int *stop, constant Part &part, uint row, uint rows,
                             uint lane) {
  const bool exists = row + lane < rows;
  const uint query = exists ? (row + lane) / part.rows_per_query : 0;
  return Keys{simd_min(exists ? uint(start[query]) : 0xFFFFFFFFu), simd_max(exists ? stop_of(stop, query) : 0u)};
}

METAL_FUNC uint tile_floor(uint i) { return i / TILE * TILE; }
METAL_FUNC uint tile_ceil(uint i) { return tile_floor(i + TILE - 1); }

// ---- Forward ----

// S = Q Kᵀ, in float: the scale comes later, and without it a score may be beyond the largest half.
template <typename T>
kernel void attention_scores(device const T *q [[buffer(0)]], device const T *k [[buffer(1)]],
                             device float *scores [[buffer(2)]], device const int *start [[buffer(3)]],
                             device const int *stop [[buffer(4), function_constant(has_stop)]],
                             device const int *live [[buffer(5)]], constant Part &part [[buffer(6)]],
                             uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_threadgroup]]) {
  threadgroup T stage[TILE * TILE];
  const uint key = group.x * TILE, row = part.first_row + group.y * TILE, head = group.z, rows = live_rows(live, part);
  if (row >= rows) return;
  const Keys seen = seen_by_tile(start, stop, part, row, rows, lane);
  if (key + TILE <= seen.first || key >= seen.stop) return;
  Tile<float> sum;
  clear(sum);
  multiply_nt(sum, q + place(part, row, head) * part.size, row_stride(part), k + key_place(part, key, head),
              key_stride(part), rows - row, seen.stop - key, part.size, aligned, stage, lane);
  const Output<float> output = {scores + score_place(part, row, head) + key, part.columns};
  store(sum, output, 0, 0, TILE, TILE, lane);
}

// P = softmax(scale S) of one row, and its log-sum-exp. In the rest of the row's tiles P is a hard zero: P V reads
// whole tiles.
template <typename T>
kernel void attention_softmax(device const float *scores [[buffer(0)]], device T *p [[buffer(1)]],
                              device float *lse [[buffer(2)]], device const int *start [[buffer(3)]],
                              device const int *stop [[buffer(4), function_constant(has_stop)]],
                              device const int *live [[buffer(5)]], constant Part &part [[buffer(6)]],
                              uint3 group [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
                              uint simdgroups [[simdgroups_per_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float scratch[kSimdgroups];
  const uint threads = simdgroups * kLanes;
  const uint row = part.first_row + group.x, head = group.z, rows = live_rows(live, part);
  if (row >= rows) return;
  const Keys seen = seen_by_tile(start, stop, part, tile_floor(row), rows, lane);
  const uint query = row / part.rows_per_query, first = uint(start[query]), last = stop_of(stop, query);
  const uint at = score_place(part, row, head);
  device const float4 *row_scores = (device const float4 *)(scores + at);
  device vec<T, 4> *row_p = (device vec<T, 4> *)(p + at);

  // The largest score, and the sum of exponentials below it, in one pass: the sum is scaled down as the largest grows.
  float top = -FLT_MAX, total = 0.0f;
  for (uint i = first / 4 + index; i * 4 < last; i += threads) {
    const float4 s = row_scores[i] * part.scale;
    float new_top = top;
    for (uint j = 0; j < 4; j++)
      if (i * 4 + j >= first && i * 4 + j < last) new_top = max(new_top, s[j]);
    total *= precise::exp(top - new_top);
    for (uint j = 0; j < 4; j++)
      if (i * 4 + j >= first && i * 4 + j < last) total += precise::exp(s[j] - new_top);
    top = new_top;
  }
  const float row_top = threadgroup_max(top, scratch, index, threads);
  total = threadgroup_sum(total * precise::exp(top - row_top), scratch, index, threads);

  const float inverse = 1.0f / total;
  for (uint i = tile_floor(seen.first) / 4 + index; i * 4 < tile_ceil(seen.stop); i += threads) {
    const float4 s = row_scores[i] * part.scale;
    vec<T, 4> probabilities = vec<T, 4>(T(0.0f));
    for (uint j = 0; j < 4; j++)
      if (i * 4 + j >= first && i * 4 + j < last) probabilities[j] = T(precise::exp(s[j] - row_top) * inverse);
    row_p[i] = probabilities;
  }
  if (index == 0) lse[place(part, row, head)] = row_top + precise::log(total);
}

// O = P V and dQ = dS K: `weights` times the rows of x that a head reads. With spans, group.z counts them last.
template <typename T>
kernel void attention_values(device const T *weights [[buffer(0)]], device const T *x [[buffer(1)]],
                             device T *out [[buffer(2)]], device const int *start [[buffer(3)]],
                             device const int *stop [[buffer(4), function_constant(has_stop)]],
                             device const int *live [[buffer(5)]], constant Part &part [[buffer(6)]],
                             device float *partial [[buffer(7), function_constant(has_spans)]],
                             uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_threadgroup]]) {
  const uint column = group.x * TILE, row = part.first_row + group.y * TILE, rows = live_rows(live, part);
  const uint head = group.z % part.heads, span = group.z / part.heads * part.span;
  if (row >= rows) return;
  const Keys seen = seen_by_tile(start, stop, part, row, rows, lane);
  const uint first = max(tile_floor(seen.first), span), last = min(seen.stop, span + part.span);
  if (first >= last) return;
  Tile<float> sum;
  clear(sum);
  multiply_nn(sum, weights + score_place(part, row, head) + first, part.columns,
              x + key_place(part, first, head) + column, key_stride(part), rows - row, part.size - column, last - first,
              aligned, lane);
  if (has_spans) {
    const Output<float> output = {partial + (group.z * part.rows + row - part.first_row) * part.size, part.size};
    store(sum, output, 0, column, rows - row, part.size - column, lane);
  } else {
    const Output<T> output = {out + place(part, row, head) * part.size, row_stride(part)};
    store(sum, output, 0, column, rows - row, part.size - column, lane);
  }
}

// The sum of a row's spans, in their order. Those without keys that its tile sees were not computed.
template <typename T>
kernel void attention_spans(device const float *partial [[buffer(0)]], device T *out [[buffer(1)]],
                            device const int *start [[buffer(2)]],
                            device const int *stop [[buffer(3), function_constant(has_stop)]],
                            device const int *live [[buffer(4)]], constant Part &part [[buffer(5)]],
                            uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_threadgroup]]) {
  const uint row = part.first_row + group.x, head = group.z, rows = live_rows(live, part);
  if (row >= rows) return;
  const Keys seen = seen_by_tile(start, stop, part, tile_floor(row), rows, lane);
  for (uint column = lane; column < part.size; column += kLanes) {
    float sum = 0.0f;
    for (uint span = seen.first / part.span; span * part.span < seen.stop; span++)
      sum += partial[((span * part.heads + head) * part.rows + row - part.first_row) * part.size + column];
    out[place(part, row, head) * part.size + column] = T(sum);
  }
}

// ---- Backward ----

// delta = rowsum(dO ∘ O), which equals rowsum(P ∘ dP). A simdgroup takes a row of a head.
template <typename T>
kernel void attention_delta(device const T *d_out [[buffer(0)]], device const T *out [[buffer(1)]],
                            device float *delta [[buffer(2)]], device const int *live [[buffer(3)]],
                            constant Part &part [[buffer(4)]], uint3 group [[threadgroup_position_in_grid]],
                            uint lane [[thread_index_in_simdgroup]], uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint simdgroups [[simdgroups_per_threadgroup]]) {
  const uint row = group.x * simdgroups + simdgroup;
  if (row >= live_rows(live, part)) return;
  const ulong at = place(part, row, group.z);
  float sum = 0.0f;
  for (uint i = lane; i < part.size; i += kLanes)
    sum += float(d_out[at * part.size + i]) * float(out[at * part.size + i]);
  sum = simd_sum(sum);
  if (lane == 0) delta[at] = sum;
}

// P = exp(scale S - lse) of a tile, from its scores.
template <typename T>
struct Probabilities {
  device T *to;
  uint stride;
  uint query, key, queries;   // of the tile's corner; how many queries live
  float scale;
  device const int *start;    // of all queries
  device const float *lse;    // of the first query
  uint lse_stride;
};

// dS = P ∘ (dP - delta) scale of the same tile, from dP.
template <typename T>
struct ScoreGradients {
  Probabilities<T> p;
  device T *to;
  device const float *delta;  // laid out like lse
};

template <typename T>
METAL_FUNC bool is_seen(thread const Probabilities<T> &p, uint row, uint column) {
  const uint query = p.query + row, key = p.key + column;
  return query < p.queries && key <= query && key >= uint(p.start[query]);
}

template <typename T>
METAL_FUNC void finish(thread const Probabilities<T> &p, uint row, uint column, float score) {
  float probability = 0.0f;
  if (is_seen(p, row, column)) probability = precise::exp(score * p.scale - p.lse[(p.query + row) * p.lse_stride]);
  p.to[row * p.stride + column] = T(probability);
}

template <typename T>
METAL_FUNC void finish(thread const ScoreGradients<T> &ds, uint row, uint column, float dp) {
  const uint at = row * ds.p.stride + column;
  float gradient = 0.0f;
  if (is_seen(ds.p, row, column))
    gradient = float(ds.p.to[at]) * (dp - ds.delta[(ds.p.query + row) * ds.p.lse_stride]) * ds.p.scale;
  ds.to[at] = T(gradient);
}

// P again, and dS: two products for a tile, one after the other, as there are accumulators for one. Between them P lies
// where it must go in any case.
template <typename T>
kernel void attention_score_gradients(device const T *q [[buffer(0)]], device const T *k [[buffer(1)]],
                                      device const T *d_out [[buffer(2)]], device const T *v [[buffer(3)]],
                                      device const float *lse [[buffer(4)]], device const float *delta [[buffer(5)]],
                                      device T *p [[buffer(6)]], device T *ds [[buffer(7)]],
                                      device const int *start [[buffer(8)]], device const int *live [[buffer(9)]],
                                      constant Part &part [[buffer(10)]],
                                      uint3 group [[threadgroup_position_in_grid]],
                                      uint lane [[thread_index_in_threadgroup]]) {
  threadgroup T stage[TILE * TILE];
  const uint key = group.x * TILE, row = part.first_row + group.y * TILE, head = group.z, rows = live_rows(live, part);
  if (row >= rows) return;
  const Keys seen = seen_by_tile(start, start, part, row, rows, lane);  // the second is not read without has_stop
  if (key + TILE <= seen.first || key >= seen.stop) return;
  const ulong from = place(part, row, head) * part.size, key_from = key_place(part, key, head);
  const uint to = score_place(part, row, head) + key, head_at = place(part, 0, head);
  const Probabilities<T> probabilities = {
      p + to, part.columns, row, key, rows, part.scale, start, lse + head_at, part.row_heads};
  const ScoreGradients<T> gradients = {probabilities, ds + to, delta + head_at};
  Tile<float> sum;
  clear(sum);
  multiply_nt(sum, q + from, row_stride(part), k + key_from, key_stride(part), rows - row, seen.stop - key, part.size,
              aligned, stage, lane);
  store(sum, probabilities, 0, 0, TILE, TILE, lane);
  clear(sum);
  multiply_nt(sum, d_out + from, row_stride(part), v + key_from, key_stride(part), rows - row, seen.stop - key,
              part.size, aligned, stage, lane);
  store(sum, gradients, 0, 0, TILE, TILE, lane);
}

// The first of the queries from `query` on that sees no key up to `key` any more. There is one behind which all are so,
// as start never decreases.
METAL_FUNC uint first_past(device const int *start, uint key, uint query, uint queries) {
  uint stop = queries;
  while (query < stop) {
    const uint middle = (query + stop) / 2;
    if (uint(start[middle]) > key) stop = middle;
    else query = middle + 1;
  }
  return query;
}

// A sum to which parts of the rows add one after the other.
template <typename T>
struct CarriedSum {
  device T *to;
  uint to_stride;
  device float *carried;
  uint carried_stride;
  bool begun, ends;
};

template <typename T>
METAL_FUNC void finish(thread const CarriedSum<T> &sum, uint row, uint column, float value) {
  device float *carried = sum.carried + row * sum.carried_stride + column;
  if (sum.begun) value += *carried;
  if (sum.ends) sum.to[row * sum.to_stride + column] = T(value);
  else *carried = value;
}

// dV = Pᵀ dO and dK = dSᵀ Q: for a tile of keys, one sum over the queries that see it and the heads that read it. Here
// group.z counts key heads.
template <typename T>
kernel void attention_keys(device const T *weights [[buffer(0)]], device const T *x [[buffer(1)]],
                           device T *out [[buffer(2)]], device const int *start [[buffer(3)]],
                           device const int *live [[buffer(4)]], constant Part &part [[buffer(5)]],
                           device float *carried [[buffer(6), function_constant(has_carried)]],
                           uint3 group [[threadgroup_position_in_grid]], uint lane [[thread_index_in_threadgroup]]) {
  const uint column = group.x * TILE, key = group.y * TILE, rows = live_rows(live, part);
  if (key >= rows) return;
  // Whole tiles of queries: of one that any query of the tile sees, all of it was computed.
  const uint first = max(key, part.first_row);
  const uint past = tile_ceil(first_past(start, key + TILE - 1, first, rows));
  const uint last = min(min(past, rows), part.first_row + part.rows);
  const uint first_head = group.z * part.heads_per_key;
  Tile<float> sum;
  clear(sum);
  if (first < last) {
    for (uint head = first_head; head < first_head + part.heads_per_key; head++)
      multiply_tn(sum, weights + score_place(part, first, head) + key, part.columns,
                  x + place(part, first, head) * part.size + column, row_stride(part), part.columns - key,
                  part.size - column, last - first, aligned, lane);
  }
  device T *to = out + key_place(part, key, first_head);
  const uint columns = part.size - column;
  if (has_carried) {
    device float *sums = carried + (group.z * part.columns + key) * part.size;
    const CarriedSum<T> output = {to, key_stride(part), sums, part.size, key < part.first_row, part.last != 0};
    store(sum, output, 0, column, rows - key, columns, lane);
  } else {
    const Output<T> output = {to, key_stride(part)};
    store(sum, output, 0, column, rows - key, columns, lane);
  }
}

#define ATTENTION(T, name) \
  template [[host_name("attention_scores_" name)]] kernel void attention_scores<T>( \
      device const T *, device const T *, device float *, device const int *, device const int *, \
      device const int *, constant Part &, uint3, uint); \
  template [[host_name("attention_softmax_" name)]] kernel void attention_softmax<T>( \
      device const float *, device T *, device float *, device const int *, device const int *, \
      device const int *, constant Part &, uint3, uint, uint, uint); \
  template [[host_name("attention_values_" name)]] kernel void attention_values<T>( \
      device const T *, device const T *, device T *, device const int *, device const int *, \
      device const int *, constant Part &, device float *, uint3, uint); \
  template [[host_name("attention_spans_" name)]] kernel void attention_spans<T>( \
      device const float *, device T *, device const int *, device const int *, device const int *, \
      constant Part &, uint3, uint); \
  template [[host_name("attention_delta_" name)]] kernel void attention_delta<T>( \
      device const T *, device const T *, device float *, device const int *, constant Part &, uint3, uint, \
      uint, uint); \
  template [[host_name("attention_score_gradients_" name)]] kernel void attention_score_gradients<T>( \
      device const T *, device const T *, device const T *, device const T *, device const float *, \
      device const float *, device T *, device T *, device const int *, device const int *, constant Part &, \
      uint3, uint); \
  template [[host_name("attention_keys_" name)]] kernel void attention_keys<T>( \
      device const T *, device const T *, device T *, device const int *, device const int *, constant Part &, \
      device float *, uint3, uint);

ATTENTION(half, "f16")
ATTENTION(float, "f32")
