// The way of tiles from registers to memory and back, through shared memory.
#pragma once
#include "hopper.h"

// A warp's 16 rows of a tile on their way from registers to memory, in shared memory: registers hold pieces of 8 × 8,
// and memory wants whole rows. Rows are a vector longer than they need be, which spreads them over the banks.
template <typename T, int kWidth>
struct Staging {
  static constexpr int kPitch = kWidth * 2 + 16, kBytes = 16 * kPitch, kVectors = kWidth / 8;  // of a row

  uint8 *rows;

  // Where a lane's row lies of the four 8 × 8 matrices that hold columns 16 · group on.
  __device__ uint8 *at(int group) const {
    const int lane = threadIdx.x % kWarp;
    return rows + (lane / 8 % 2 * 8 + lane % 8) * kPitch + group * 32 + lane / 16 * 16;
  }
  __device__ __forceinline__ void put(int group, const float *x) const {
    store_matrices(at(group), {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]), pack<T>(x[4], x[5]), pack<T>(x[6], x[7])});
  }
  // Pairs of elements as they lie in memory.
  __device__ void put(int group, const uint32 (&pairs)[4]) const { store_matrices(at(group), pairs); }
  __device__ void get(int group, uint32 (&pairs)[4]) const { load_matrices(pairs, at(group)); }
  // To or from a matrix in memory, as much of the 16 × kWidth as lies within `rows_left` and `columns_left`.
  __device__ __forceinline__ void write(T *to, int stride, int rows_left, int columns_left) const {
    __syncwarp();
    each(rows_left, columns_left, [&](int row, int column, uint8 *here) {
      *reinterpret_cast<uint4 *>(to + row * stride + column) = *reinterpret_cast<const uint4 *>(here);
    });
    __syncwarp();
  }
  // Without waiting: fetched() waits.
  __device__ void fetch(const T *from, int stride, int rows_left, int columns_left) const {
    each(rows_left, columns_left,
         [&](int row, int column, uint8 *here) { copy_16_async(here, from + row * stride + column, true); });
    end_copies();
  }
  __device__ static void fetched() {
    wait_copies<0>();
    __syncwarp();
  }

  // Lanes next to one another have adjacent vectors of a row.
  template <typename Action>
  __device__ __forceinline__ void each(int rows_left, int columns_left, Action action) const {
    constexpr int kLanes = kVectors % 16 == 0 ? 16 : kVectors % 8 == 0 ? 8 : kVectors % 4 == 0 ? 4 : 2;
    const int lane = threadIdx.x % kWarp;
#pragma unroll
    for (int first = 0; first < kVectors; first += kLanes) {
      const int column = (first + lane % kLanes) * 8;
      if (column >= columns_left) continue;
#pragma unroll 2
      for (int row = lane / kLanes; row < 16; row += kWarp / kLanes)
        if (row < rows_left) action(row, column, rows + row * kPitch + column * 2);
    }
  }
};
