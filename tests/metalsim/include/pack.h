// <metal_pack>: several small numbers in one integer, the first in the lowest bits.
#pragma once
#include "common.h"

namespace metalsim {

// A number from 0 to 1, or from -1 to 1, as an integer of `bits` bits; rounded to nearest even.
METALSIM_FUNCTION uint to_unorm(float x, uint bits) {
  const float most = float((1u << bits) - 1);
  return uint(__builtin_rintf(metal::saturate(x) * most));
}
METALSIM_FUNCTION uint to_snorm(float x, uint bits) {
  const float most = float((1u << (bits - 1)) - 1);
  const float clamped = x == x ? metal::clamp(x, -1.0f, 1.0f) : 0.0f;
  return uint(int(__builtin_rintf(clamped * most))) & ((1u << bits) - 1);
}
METALSIM_FUNCTION float from_unorm(uint x, uint bits) {
  const uint most = (1u << bits) - 1;
  return float(x & most) / float(most);
}
METALSIM_FUNCTION float from_snorm(uint x, uint bits) {
  const int number = int(x << (32 - bits)) >> (32 - bits);
  return __builtin_fmaxf(float(number) / float((1u << (bits - 1)) - 1), -1.0f);
}
METALSIM_FUNCTION float to_srgb(float x) {
  const float linear = metal::saturate(x);
  return linear <= 0.0031308f ? 12.92f * linear : 1.055f * __builtin_powf(linear, 1.0f / 2.4f) - 0.055f;
}
METALSIM_FUNCTION float from_srgb(float x) {
  return x <= 0.04045f ? x / 12.92f : __builtin_powf((x + 0.055f) / 1.055f, 2.4f);
}

template <uint Bits, class T, int N>
METALSIM_FUNCTION uint pack_unorm(vec<T, N> v) {
  uint packed = 0;
  for (int i = 0; i < N; i++) packed |= to_unorm(float(v.s[i]), Bits) << (Bits * i);
  return packed;
}
template <uint Bits, class T, int N>
METALSIM_FUNCTION uint pack_snorm(vec<T, N> v) {
  uint packed = 0;
  for (int i = 0; i < N; i++) packed |= to_snorm(float(v.s[i]), Bits) << (Bits * i);
  return packed;
}
template <uint Bits, class T, int N>
METALSIM_FUNCTION vec<T, N> unpack_unorm(uint packed) {
  vec<T, N> v;
  for (int i = 0; i < N; i++) v.s[i] = T(from_unorm(packed >> (Bits * i), Bits));
  return v;
}
template <uint Bits, class T, int N>
METALSIM_FUNCTION vec<T, N> unpack_snorm(uint packed) {
  vec<T, N> v;
  for (int i = 0; i < N; i++) v.s[i] = T(from_snorm(packed >> (Bits * i), Bits));
  return v;
}

}  // namespace metalsim

namespace metal {

#define METALSIM_PACK(T)                                                                                             \
  METALSIM_FUNCTION uint pack_##T##_to_unorm4x8(vec<T, 4> v) { return ::metalsim::pack_unorm<8>(v); }                \
  METALSIM_FUNCTION uint pack_##T##_to_snorm4x8(vec<T, 4> v) { return ::metalsim::pack_snorm<8>(v); }                \
  METALSIM_FUNCTION uint pack_##T##_to_unorm2x16(vec<T, 2> v) { return ::metalsim::pack_unorm<16>(v); }              \
  METALSIM_FUNCTION uint pack_##T##_to_snorm2x16(vec<T, 2> v) { return ::metalsim::pack_snorm<16>(v); }              \
  METALSIM_FUNCTION vec<T, 4> unpack_unorm4x8_to_##T(uint x) { return ::metalsim::unpack_unorm<8, T, 4>(x); }        \
  METALSIM_FUNCTION vec<T, 4> unpack_snorm4x8_to_##T(uint x) { return ::metalsim::unpack_snorm<8, T, 4>(x); }        \
  METALSIM_FUNCTION vec<T, 2> unpack_unorm2x16_to_##T(uint x) { return ::metalsim::unpack_unorm<16, T, 2>(x); }      \
  METALSIM_FUNCTION vec<T, 2> unpack_snorm2x16_to_##T(uint x) { return ::metalsim::unpack_snorm<16, T, 2>(x); }      \
  METALSIM_FUNCTION uint pack_##T##_to_srgb_unorm4x8(vec<T, 4> v) {                                                  \
    return ::metalsim::pack_unorm<8>(vec<float, 4>(::metalsim::to_srgb(float(v.x)), ::metalsim::to_srgb(float(v.y)), \
                                                   ::metalsim::to_srgb(float(v.z)), float(v.w)));                    \
  }                                                                                                                  \
  METALSIM_FUNCTION vec<T, 4> unpack_unorm4x8_srgb_to_##T(uint x) {                                                  \
    const vec<float, 4> v = ::metalsim::unpack_unorm<8, float, 4>(x);                                                \
    return vec<T, 4>(T(::metalsim::from_srgb(v.x)), T(::metalsim::from_srgb(v.y)), T(::metalsim::from_srgb(v.z)),    \
                     T(v.w));                                                                                        \
  }                                                                                                                  \
  METALSIM_FUNCTION uint pack_##T##_to_unorm10a2(vec<T, 4> v) {                                                      \
    return ::metalsim::pack_unorm<10>(vec<T, 3>(v.xyz)) | ::metalsim::to_unorm(float(v.w), 2) << 30;                 \
  }                                                                                                                  \
  METALSIM_FUNCTION vec<T, 4> unpack_unorm10a2_to_##T(uint x) {                                                      \
    return vec<T, 4>(::metalsim::unpack_unorm<10, T, 3>(x), T(::metalsim::from_unorm(x >> 30, 2)));                  \
  }                                                                                                                  \
  METALSIM_FUNCTION ushort pack_##T##_to_unorm565(vec<T, 3> v) {                                                     \
    return ushort(::metalsim::to_unorm(float(v.x), 5) | ::metalsim::to_unorm(float(v.y), 6) << 5 |                   \
                  ::metalsim::to_unorm(float(v.z), 5) << 11);                                                        \
  }                                                                                                                  \
  METALSIM_FUNCTION vec<T, 3> unpack_unorm565_to_##T(ushort x) {                                                     \
    return vec<T, 3>(T(::metalsim::from_unorm(x, 5)), T(::metalsim::from_unorm(x >> 5, 6)),                          \
                     T(::metalsim::from_unorm(x >> 11, 5)));                                                         \
  }
METALSIM_PACK(float)
METALSIM_PACK(half)
#undef METALSIM_PACK

}  // namespace metal
