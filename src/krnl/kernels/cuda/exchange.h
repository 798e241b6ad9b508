// Sums that the blocks of a cluster share, through one another's shared memory.
#pragma once
#include "hopper.h"

// The threads behind a block's first warpgroup, kThreads of them, have kCount sums each. All blocks' are added in the
// order of their ranks, and a block gets its part: those from rank · kCount / kSplit on. `exchange` lies at the same
// place in all blocks, a multiple of 16 bytes, and has room for kCount floats of each thread. What lay there must have
// been used by the time that a thread calls this; the threads of the first warpgroup call share_nothing.
template <int kSplit, int kThreads, int kCount>
__device__ __forceinline__ void share(const float (&sums)[kCount], float (&mine)[kCount / kSplit], void *exchange) {
  constexpr int kShare = kCount / kSplit;
  static_assert(kCount % (4 * kSplit) == 0, "parts are whole vectors of four");
  const int thread = threadIdx.x - kWarpgroup, rank = cluster_rank();
  float4 *const places = static_cast<float4 *>(exchange);  // [rank of the sender][four sums][thread]
  sync_cluster();
#pragma unroll
  for (int peer = 0; peer < kSplit; peer++) {
    const uint32 address = peer_address(places, peer);
#pragma unroll
    for (int i = 0; i < kShare; i += 4) {
      const float *const four = &sums[peer * kShare + i];
      store_peer(address + ((rank * (kShare / 4) + i / 4) * kThreads + thread) * 16, {four[0], four[1], four[2], four[3]});
    }
  }
  sync_cluster();
#pragma unroll
  for (int i = 0; i < kShare; i++) mine[i] = 0.0f;
#pragma unroll
  for (int peer = 0; peer < kSplit; peer++) {
#pragma unroll
    for (int i = 0; i < kShare; i += 4) {
      const float4 four = places[(peer * (kShare / 4) + i / 4) * kThreads + thread];
      mine[i] += four.x, mine[i + 1] += four.y, mine[i + 2] += four.z, mine[i + 3] += four.w;
    }
  }
}

// Meets the others as often as share does.
__device__ inline void share_nothing() {
  sync_cluster();
  sync_cluster();
}
