// What the attention kernels share.
#pragma once
#include "common.h"

struct Shape {
  int32 heads, key_heads, size;  // h, g, d
  int32 blocks;                  // that share the rows of a head
  float scale;
};

// The first of the queries from `query` on that sees no key up to `key` any more. There is one behind which all are so,
// as start never decreases. Whole warps call it: each lane looks at the end of one of 32 pieces.
__device__ inline int first_past(const int32 *start, int key, int query, int queries) {
  int stop = queries;
  while (query < stop) {
    const int piece = pieces(stop - query, kWarp), last = query + (int(threadIdx.x % kWarp) + 1) * piece - 1;
    query += __popc(__ballot_sync(~0u, last < stop && start[last] <= key)) * piece;
    stop = min_of(stop, query + piece - 1);
  }
  return query;
}

// Keys that some of the live queries of a run see, and keys that all of them see.
struct Seen {
  int first, stop, all_first, all_stop;

  __device__ bool any(int key, int count) const { return key < stop && key + count > first; }
  __device__ bool all(int key, int count) const { return key >= all_first && key + count <= all_stop; }
};

// Without `stop`, a query sees the keys up to itself.
__device__ inline int stop_of(const int32 *stop, int query) { return stop == nullptr ? query + 1 : stop[query]; }

// Whole warps call it. It may be that no query of the run is live.
__device__ inline Seen seen_by(const int32 *start, const int32 *stop, int first, int count, int queries) {
  constexpr int kNever = 0x7FFFFFFF;
  Seen seen = {kNever, 0, 0, kNever};
  for (int query = first + threadIdx.x % kWarp; query < min_of(first + count, queries); query += kWarp) {
    const int from = start[query], to = stop_of(stop, query);
    seen = {min_of(seen.first, from), max_of(seen.stop, to), max_of(seen.all_first, from), min_of(seen.all_stop, to)};
  }
  return {__reduce_min_sync(~0u, seen.first), __reduce_max_sync(~0u, seen.stop),
          __reduce_max_sync(~0u, seen.all_first), __reduce_min_sync(~0u, seen.all_stop)};
}

// Over the four lanes that share rows of a fragment.
__device__ inline float sum_of_four(float x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ inline float max_of_four(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
