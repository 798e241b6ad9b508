// Element types, functions of numbers, how the launches of a graph overlap, and sums over a block.
//
// NVRTC has no standard headers and none of CUDA's are needed: what they would give is here.
#pragma once

using int32 = int;
using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;

// Named as the host names them.
using f32 = float;
struct f16 {
  uint16 bits;
};
struct bf16 {
  uint16 bits;
};

constexpr int kWarp = 32;
constexpr float kLowest = -3.402823466e38f;  // of all finite floats
constexpr float kLog2E = 1.44269504f;  // exponentials are taken as powers of two

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bf16 x) { return __uint_as_float(uint32(x.bits) << 16); }
__device__ inline float to_float(f16 x) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
  return result;
}

// Rounded to the nearest, ties to even.
template <typename T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline bf16 from_float<bf16>(float x) {
  bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
  return result;
}
template <>
__device__ inline f16 from_float<f16>(float x) {
  f16 result;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
  return result;
}

// Two floats as two 16-bit elements in one register, the first in the lower half.
template <typename T>
__device__ uint32 pack(float low, float high);
template <>
__device__ inline uint32 pack<bf16>(float low, float high) {
  uint32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}
template <>
__device__ inline uint32 pack<f16>(float low, float high) {
  uint32 result;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// The inverse of pack.
template <typename T>
__device__ inline float2 unpack(uint32 two) {
  return {to_float(T{uint16(two)}), to_float(T{uint16(two >> 16)})};
}

__device__ inline float infinity() { return __uint_as_float(0x7F800000u); }
__device__ inline bool is_finite(float x) { return (__float_as_uint(x) & 0x7F800000u) != 0x7F800000u; }

template <typename T>
__device__ constexpr T min_of(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
__device__ constexpr T max_of(T a, T b) {
  return a > b ? a : b;
}
template <typename T>
__device__ constexpr T pieces(T size, T piece) {
  return (size + piece - 1) / piece;
}

__device__ inline float power_of_two(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}
// 1 / x, to 1 ulp.
__device__ inline float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// σ(x) and, in `rest`, 1 - σ(x), each without cancellation or overflow.
__device__ inline float sigmoid(float x, float &rest) {
  const float decay = expf(-fabsf(x)), larger = 1.0f / (1.0f + decay), smaller = decay * larger;
  rest = x >= 0.0f ? smaller : larger;
  return x >= 0.0f ? larger : smaller;
}

// From sm_90 on launches overlap (programmatic dependent launch): one begins when each block of the one before lets it
// or has ended, and can wait for the end of that one, not of others. So that this is enough, every thread waits before
// it ends, and no block lets the next launch begin before it has waited. Thus, when launch i begins, i - 2 has ended,
// for which all blocks of i - 1 have waited; and so have those before it, since i - 2 did not end before i - 3. Only
// i - 1 may still run, and when that has ended, all have.
//
// A kernel makes a PreviousLaunch before it touches memory that kernels write. Usually this waits at once. A launch
// that is `beside` the one before, as the host says where neither writes what the other touches, works meanwhile and
// waits at its end, which threads without work reach early. Of what earlier launches wrote it must not find an older
// state in its multiprocessor's cache: the fence sees to that, and the copy engine reads past that cache.
//
// A launch that does not overlap, such as a graph's first, begins when all before it have ended; its waits are over.
struct PreviousLaunch {
  const bool beside;

  __device__ explicit PreviousLaunch(int32 beside) : beside(beside) {
#if __CUDA_ARCH__ >= 900
    if (beside) {
      asm volatile("fence.acq_rel.gpu;" ::: "memory");
    } else {
      wait();
    }
#endif
  }
  __device__ ~PreviousLaunch() {
#if __CUDA_ARCH__ >= 900
    if (beside) wait();
#endif
  }

 private:
  __device__ static void wait() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  }
};

// Sums and maxima over a warp, then over a block. All threads take part and all get the result. `scratch` holds kWarp
// floats of shared memory and may be used again at once.
__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x += __shfl_xor_sync(~0u, x, offset);
  return x;
}
__device__ inline float warp_max(float x) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, offset));
  return x;
}
__device__ inline float block_sum(float x, float *scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  x = warp_sum(x);
  if (warps == 1) return x;
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = warp_sum(lane < warps ? scratch[lane] : 0.0f);
  __syncthreads();
  return x;
}
__device__ inline float block_max(float x, float *scratch) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  x = warp_max(x);
  if (warps == 1) return x;
  if (lane == 0) scratch[warp] = x;
  __syncthreads();
  x = warp_max(lane < warps ? scratch[lane] : kLowest);
  __syncthreads();
  return x;
}
