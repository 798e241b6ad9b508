// What NVRTC gives a source without any header: qualifiers, built-in types and variables, intrinsics, float functions.
#pragma once

#include "../engine/engine.h"

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

#define threadIdx (cudasim_thread->thread)
#define blockIdx (cudasim_thread->block)
#define blockDim (cudasim_thread->block_size)
#define gridDim (cudasim_thread->grid)

struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

extern "C" {
float expf(float) noexcept;
float exp2f(float) noexcept;
float logf(float) noexcept;
float log2f(float) noexcept;
float sqrtf(float) noexcept;
float fabsf(float) noexcept;
float fmaxf(float, float) noexcept;
float fminf(float, float) noexcept;
float fmaf(float, float, float) noexcept;
double sin(double) noexcept;
double cos(double) noexcept;
}
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
inline float __expf(float x) { return expf(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline void sincospif(float x, float *sine, float *cosine) {
  constexpr double kPi = 3.14159265358979323846;
  *sine = float(sin(kPi * double(x)));
  *cosine = float(cos(kPi * double(x)));
}

// What code calls that is compiled with -fsanitize=alignment,bounds. Each library of kernels has its own, which nobody
// else sees: those of the Metal simulator have the same names.
#define CUDASIM_HANDLER extern "C" __attribute__((used, weak, noinline, visibility("hidden"))) void
CUDASIM_HANDLER __ubsan_handle_type_mismatch_v1(const void *, const void *pointer) {
  cudasim_misaligned(pointer, __builtin_return_address(0));
}
CUDASIM_HANDLER __ubsan_handle_out_of_bounds(const void *, const void *index) {
  cudasim_outside_array(index, __builtin_return_address(0));
}

// What calls the engine: reports name the kernel's function.
#define CUDASIM_INLINE __attribute__((always_inline)) inline

namespace cudasim {

template <typename To, typename From>
inline To bits_as(const From &from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

// What a lane of the last exchange gave.
template <typename T>
inline T of_lane(const Slot *slots, int lane) {
  T value;
  __builtin_memcpy(&value, slots[lane].bytes, sizeof value);
  return value;
}

// Only whole warps take part; a mask of some lanes would be a fault of the kernel, or new here.
template <typename T>
CUDASIM_INLINE const Slot *exchange(unsigned mask, const T &mine) {
  if (mask != ~0u) __builtin_trap();
  return cudasim_exchange(Operation::gather, &mine, sizeof mine);
}

template <typename T, typename Combine>
CUDASIM_INLINE T reduce(unsigned mask, T mine, Combine combine) {
  const Slot *slots = exchange(mask, mine);
  T result = of_lane<T>(slots, 0);
  for (int lane = 1; lane < kLanes; lane++) result = combine(result, of_lane<T>(slots, lane));
  return result;
}

inline int lane() { return int(threadIdx.x) % kLanes; }

}  // namespace cudasim

inline float __uint_as_float(unsigned x) { return cudasim::bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return cudasim::bits_as<unsigned>(x); }
inline float __int_as_float(int x) { return cudasim::bits_as<float>(x); }
inline int __float_as_int(float x) { return cudasim::bits_as<int>(x); }
inline unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
template <typename T>
inline T __ldg(const T *from) {
  return *from;
}

// Macros, so that a report names the line of the kernel.
#define __syncthreads() cudasim_sync_block(0, 0)
#define __syncwarp() ((void)cudasim_exchange(cudasim::Operation::sync, nullptr, 0))
template <typename T>
CUDASIM_INLINE T __shfl_sync(unsigned mask, T x, int lane) {
  return cudasim::of_lane<T>(cudasim::exchange(mask, x), lane & 31);
}
template <typename T>
CUDASIM_INLINE T __shfl_xor_sync(unsigned mask, T x, int other) {
  return cudasim::of_lane<T>(cudasim::exchange(mask, x), cudasim::lane() ^ other);
}
template <typename T>
CUDASIM_INLINE T __shfl_down_sync(unsigned mask, T x, int distance) {
  const int lane = cudasim::lane() + distance;
  return cudasim::of_lane<T>(cudasim::exchange(mask, x), lane < 32 ? lane : cudasim::lane());
}
template <typename T>
CUDASIM_INLINE T __shfl_up_sync(unsigned mask, T x, int distance) {
  const int lane = cudasim::lane() - distance;
  return cudasim::of_lane<T>(cudasim::exchange(mask, x), lane >= 0 ? lane : cudasim::lane());
}
CUDASIM_INLINE unsigned __ballot_sync(unsigned mask, int x) {
  const cudasim::Slot *slots = cudasim::exchange(mask, x);
  unsigned result = 0;
  for (int i = 0; i < 32; i++) result |= unsigned(cudasim::of_lane<int>(slots, i) != 0) << i;
  return result;
}
CUDASIM_INLINE int __any_sync(unsigned mask, int x) { return __ballot_sync(mask, x) != 0; }
CUDASIM_INLINE int __all_sync(unsigned mask, int x) { return __ballot_sync(mask, x) == ~0u; }
template <typename T>
CUDASIM_INLINE T __reduce_min_sync(unsigned mask, T x) {
  return cudasim::reduce(mask, x, [](T a, T b) { return a < b ? a : b; });
}
template <typename T>
CUDASIM_INLINE T __reduce_max_sync(unsigned mask, T x) {
  return cudasim::reduce(mask, x, [](T a, T b) { return a > b ? a : b; });
}
template <typename T>
CUDASIM_INLINE T __reduce_add_sync(unsigned mask, T x) {
  return cudasim::reduce(mask, x, [](T a, T b) { return a + b; });
}
CUDASIM_INLINE unsigned __cvta_generic_to_shared(const void *pointer) { return cudasim_shared_address(pointer); }

namespace cudasim {

template <unsigned... indices>
struct Indices {};
template <unsigned count, unsigned... indices>
struct CountTo : CountTo<count - 1, count - 1, indices...> {};
template <unsigned... indices>
struct CountTo<0, indices...> {
  using type = Indices<indices...>;
};
template <typename T>
struct Plain {
  using type = T;
};
template <typename T>
struct Plain<const T> {
  using type = T;
};

template <typename... Parameters, unsigned... indices>
inline void call(void (*kernel)(Parameters...), void **arguments, Indices<indices...>) {
  kernel(*static_cast<typename Plain<Parameters>::type *>(arguments[indices])...);
}

// Calls a kernel with arguments that lie where the host has packed them.
template <typename... Parameters>
inline void call(void (*kernel)(Parameters...), void **arguments) {
  call(kernel, arguments, typename CountTo<sizeof...(Parameters)>::type());
}

}  // namespace cudasim
