// Names inside Apple's own headers. Kernels written elsewhere call them to give bfloat the functions of float.
#pragma once
#include "atomic.h"

#define __METAL_MAYBE_FAST_MATH__ 0
#define __METAL_FAST_MATH__ 1
#define __METAL_PRECISE_MATH__ 2
#define __METAL_MEMORY_SCOPE_SYSTEM__ 4

#define METALSIM_INTERNAL_1(name) \
  METALSIM_FUNCTION float __metal_##name(float x, int = 0) { return metal::name(x); }
#define METALSIM_INTERNAL_2(name) \
  METALSIM_FUNCTION float __metal_##name(float x, float y, int = 0) { return metal::name(x, y); }
#define METALSIM_INTERNAL_3(name) \
  METALSIM_FUNCTION float __metal_##name(float x, float y, float z, int = 0) { return metal::name(x, y, z); }
METALSIM_INTERNAL_1(acos)
METALSIM_INTERNAL_1(acosh)
METALSIM_INTERNAL_1(asin)
METALSIM_INTERNAL_1(asinh)
METALSIM_INTERNAL_1(atan)
METALSIM_INTERNAL_1(atanh)
METALSIM_INTERNAL_1(ceil)
METALSIM_INTERNAL_1(cos)
METALSIM_INTERNAL_1(cosh)
METALSIM_INTERNAL_1(cospi)
METALSIM_INTERNAL_1(exp)
METALSIM_INTERNAL_1(exp10)
METALSIM_INTERNAL_1(exp2)
METALSIM_INTERNAL_1(fabs)
METALSIM_INTERNAL_1(floor)
METALSIM_INTERNAL_1(fract)
METALSIM_INTERNAL_1(log)
METALSIM_INTERNAL_1(log10)
METALSIM_INTERNAL_1(log2)
METALSIM_INTERNAL_1(rint)
METALSIM_INTERNAL_1(round)
METALSIM_INTERNAL_1(rsqrt)
METALSIM_INTERNAL_1(saturate)
METALSIM_INTERNAL_1(sin)
METALSIM_INTERNAL_1(sinh)
METALSIM_INTERNAL_1(sinpi)
METALSIM_INTERNAL_1(sqrt)
METALSIM_INTERNAL_1(tan)
METALSIM_INTERNAL_1(tanh)
METALSIM_INTERNAL_1(tanpi)
METALSIM_INTERNAL_1(trunc)
METALSIM_INTERNAL_2(atan2)
METALSIM_INTERNAL_2(divide)
METALSIM_INTERNAL_2(fdim)
METALSIM_INTERNAL_2(fmax)
METALSIM_INTERNAL_2(fmin)
METALSIM_INTERNAL_2(fmod)
METALSIM_INTERNAL_2(nextafter)
METALSIM_INTERNAL_2(pow)
METALSIM_INTERNAL_2(powr)
METALSIM_INTERNAL_3(clamp)
METALSIM_INTERNAL_3(fma)
METALSIM_INTERNAL_3(fmax3)
METALSIM_INTERNAL_3(fmedian3)
METALSIM_INTERNAL_3(fmin3)
#undef METALSIM_INTERNAL_1
#undef METALSIM_INTERNAL_2
#undef METALSIM_INTERNAL_3
METALSIM_FUNCTION float __metal_ldexp(float x, int k, int = 0) { return metal::ldexp(x, k); }
METALSIM_FUNCTION float __metal_frexp(float x, int *exponent, int = 0) { return metal::frexp(x, *exponent); }
METALSIM_FUNCTION int __metal_ilogb(float x, int = 0) { return metal::ilogb(x); }
METALSIM_FUNCTION ushort __metal_get_simdgroup_size(ushort) { return SIM_LANES; }

#define METALSIM_INTERNAL_LANES_1(name) \
  template <class T>                    \
  METALSIM_FUNCTION T __metal_##name(T x) { return metal::name(x); }
#define METALSIM_INTERNAL_LANES_2(name) \
  template <class T>                    \
  METALSIM_FUNCTION T __metal_##name(T x, ushort lane) { return metal::name(x, lane); }
#define METALSIM_INTERNAL_FILL(name) \
  template <class T>                 \
  METALSIM_FUNCTION T __metal_##name(T x, T filling, ushort delta, ushort modulo) {       \
    return metal::name(x, filling, delta, modulo);                                        \
  }
METALSIM_INTERNAL_LANES_1(simd_sum)
METALSIM_INTERNAL_LANES_1(simd_product)
METALSIM_INTERNAL_LANES_1(simd_max)
METALSIM_INTERNAL_LANES_1(simd_min)
METALSIM_INTERNAL_LANES_1(simd_and)
METALSIM_INTERNAL_LANES_1(simd_or)
METALSIM_INTERNAL_LANES_1(simd_prefix_inclusive_sum)
METALSIM_INTERNAL_LANES_1(simd_prefix_exclusive_sum)
METALSIM_INTERNAL_LANES_1(simd_prefix_inclusive_product)
METALSIM_INTERNAL_LANES_1(simd_prefix_exclusive_product)
METALSIM_INTERNAL_LANES_1(simd_broadcast_first)
METALSIM_INTERNAL_LANES_2(simd_broadcast)
METALSIM_INTERNAL_LANES_2(simd_shuffle)
METALSIM_INTERNAL_LANES_2(simd_shuffle_down)
METALSIM_INTERNAL_LANES_2(simd_shuffle_up)
METALSIM_INTERNAL_LANES_2(simd_shuffle_xor)
METALSIM_INTERNAL_LANES_2(simd_shuffle_rotate_down)
METALSIM_INTERNAL_LANES_2(simd_shuffle_rotate_up)
METALSIM_INTERNAL_FILL(simd_shuffle_and_fill_down)
METALSIM_INTERNAL_FILL(simd_shuffle_and_fill_up)
METALSIM_FUNCTION float __metal_simd_xor(float x) {
  return metalsim::same_bits<float>(metal::simd_xor(metalsim::same_bits<uint>(x)));
}
#undef METALSIM_INTERNAL_LANES_1
#undef METALSIM_INTERNAL_LANES_2
#undef METALSIM_INTERNAL_FILL
