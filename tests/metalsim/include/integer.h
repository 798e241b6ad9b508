// <metal_integer>, and the functions that numbers of every type have: abs, min, max, clamp …
#pragma once
#include "limits.h"
#include "math.h"

namespace metalsim {

// Wide enough for any sum or difference of two T.
template <class T>
struct wider {
  using type = metal::conditional_t<sizeof(T) < 8, long, __int128>;
};
template <class T>
using wide = typename wider<T>::type;

template <class T, class W>
METALSIM_FUNCTION T saturated(W x) {
  using limits = metal::numeric_limits<T>;
  return x > W(limits::max()) ? limits::max() : x < W(limits::min()) ? limits::min() : T(x);
}
template <class T>
METALSIM_FUNCTION T low_bits(uint bits) {
  return bits >= 8 * sizeof(T) ? T(~T(0)) : T((T(1) << bits) - 1);
}

}  // namespace metalsim

namespace metal {

#define METALSIM_ORDER(T, lesser, greater)                                                                  \
  METALSIM_FUNCTION constexpr T min(T x, T y) { return lesser; }                                            \
  METALSIM_FUNCTION constexpr T max(T x, T y) { return greater; }                                           \
  METALSIM_FUNCTION constexpr T min3(T x, T y, T z) { return min(min(x, y), z); }                           \
  METALSIM_FUNCTION constexpr T max3(T x, T y, T z) { return max(max(x, y), z); }                           \
  METALSIM_FUNCTION constexpr T median3(T x, T y, T z) { return max(min(x, y), min(max(x, y), z)); }        \
  METALSIM_FUNCTION constexpr T clamp(T x, T least, T most) { return min(max(x, least), most); }

#define METALSIM_INTEGER(T)                                                                                 \
  METALSIM_ORDER(T, (y < x ? y : x), (x < y ? y : x))                                                       \
  METALSIM_FUNCTION make_unsigned_t<T> absdiff(T x, T y) {                                                  \
    using U = make_unsigned_t<T>;                                                                           \
    return x < y ? U(U(y) - U(x)) : U(U(x) - U(y));                                                         \
  }                                                                                                         \
  METALSIM_FUNCTION T addsat(T x, T y) { return ::metalsim::saturated<T>(::metalsim::wide<T>(x) + y); }     \
  METALSIM_FUNCTION T subsat(T x, T y) { return ::metalsim::saturated<T>(::metalsim::wide<T>(x) - y); }     \
  METALSIM_FUNCTION T hadd(T x, T y) { return T((::metalsim::wide<T>(x) + y) >> 1); }                       \
  METALSIM_FUNCTION T rhadd(T x, T y) { return T((::metalsim::wide<T>(x) + y + 1) >> 1); }                  \
  METALSIM_FUNCTION T mulhi(T x, T y) {                                                                     \
    using W = conditional_t<is_signed_v<T>, __int128, unsigned __int128>;                                  \
    return T(W(x) * W(y) >> (8 * sizeof(T)));                                                              \
  }                                                                                                         \
  METALSIM_FUNCTION T madhi(T x, T y, T z) { return T(mulhi(x, y) + z); }                                   \
  METALSIM_FUNCTION T madsat(T x, T y, T z) {                                                               \
    using W = conditional_t<is_signed_v<T>, __int128, unsigned __int128>;                                  \
    return ::metalsim::saturated<T>(W(x) * W(y) + W(z));                                                   \
  }                                                                                                         \
  METALSIM_FUNCTION T clz(T x) {                                                                            \
    using U = make_unsigned_t<T>;                                                                           \
    return x == 0 ? T(8 * sizeof(T)) : T(__builtin_clzl(U(x)) - (64 - 8 * int(sizeof(T))));                 \
  }                                                                                                         \
  METALSIM_FUNCTION T ctz(T x) { return x == 0 ? T(8 * sizeof(T)) : T(__builtin_ctzl(ulong(x))); }          \
  METALSIM_FUNCTION T popcount(T x) { return T(__builtin_popcountl(make_unsigned_t<T>(x))); }               \
  METALSIM_FUNCTION T reverse_bits(T x) {                                                                   \
    return T(__builtin_bitreverse64(ulong(x)) >> (64 - 8 * sizeof(T)));                                     \
  }                                                                                                         \
  METALSIM_FUNCTION T rotate(T x, T by) {                                                                   \
    using U = make_unsigned_t<T>;                                                                           \
    const uint bits = 8 * sizeof(T), left = uint(by) % bits;                                                \
    return left == 0 ? x : T(U(U(x) << left) | U(U(x) >> (bits - left)));                                   \
  }                                                                                                         \
  METALSIM_FUNCTION T extract_bits(T x, uint offset, uint bits) {                                           \
    if (bits == 0) return T(0);                                                                             \
    const uint unused = 8 * sizeof(T) - bits;                                                               \
    return T(T(make_unsigned_t<T>(x) << (unused - offset)) >> unused);                                      \
  }                                                                                                         \
  METALSIM_FUNCTION T insert_bits(T base, T insert, uint offset, uint bits) {                               \
    using U = make_unsigned_t<T>;                                                                           \
    const U mask = U(::metalsim::low_bits<U>(bits) << offset);                                              \
    return T((U(base) & U(~mask)) | (U(U(insert) << offset) & mask));                                       \
  }                                                                                                         \
  template <int N>                                                                                          \
  METALSIM_FUNCTION vec<T, N> extract_bits(vec<T, N> x, uint offset, uint bits) {                           \
    for (int i = 0; i < N; i++) x.s[i] = extract_bits(x.s[i], offset, bits);                                \
    return x;                                                                                               \
  }                                                                                                         \
  template <int N>                                                                                          \
  METALSIM_FUNCTION vec<T, N> insert_bits(vec<T, N> x, vec<T, N> insert, uint offset, uint bits) {          \
    for (int i = 0; i < N; i++) x.s[i] = insert_bits(x.s[i], insert.s[i], offset, bits);                    \
    return x;                                                                                               \
  }                                                                                                         \
  template <int N>                                                                                          \
  METALSIM_FUNCTION vec<make_unsigned_t<T>, N> absdiff(vec<T, N> x, vec<T, N> y) {                          \
    vec<make_unsigned_t<T>, N> result;                                                                      \
    for (int i = 0; i < N; i++) result.s[i] = absdiff(x.s[i], y.s[i]);                                      \
    return result;                                                                                          \
  }
METALSIM_INTEGER_TYPES(METALSIM_INTEGER)
#undef METALSIM_INTEGER

#define METALSIM_ABS(T, U) \
  METALSIM_FUNCTION constexpr T abs(T x) { return x < T(0) ? T(-U(x)) : x; }
METALSIM_ABS(char, uchar)
METALSIM_ABS(short, ushort)
METALSIM_ABS(int, uint)
METALSIM_ABS(long, ulong)
#undef METALSIM_ABS
#define METALSIM_ABS(U) \
  METALSIM_FUNCTION constexpr U abs(U x) { return x; }
METALSIM_ABS(uchar)
METALSIM_ABS(ushort)
METALSIM_ABS(uint)
METALSIM_ABS(ulong)
#undef METALSIM_ABS
METALSIM_FUNCTION constexpr float abs(float x) { return __builtin_fabsf(x); }
METALSIM_FUNCTION constexpr half abs(half x) { return half(__builtin_fabsf(float(x))); }

// Of a number and a NaN, the number.
METALSIM_ORDER(float, __builtin_fminf(x, y), __builtin_fmaxf(x, y))
METALSIM_ORDER(half, half(__builtin_fminf(float(x), float(y))), half(__builtin_fmaxf(float(x), float(y))))
#undef METALSIM_ORDER

// The low 24 bits of two integers, multiplied.
METALSIM_FUNCTION int mul24(int x, int y) { return int(uint((x << 8) >> 8) * uint((y << 8) >> 8)); }
METALSIM_FUNCTION uint mul24(uint x, uint y) { return (x & 0xFFFFFF) * (y & 0xFFFFFF); }
METALSIM_FUNCTION int mad24(int x, int y, int z) { return int(uint(mul24(x, y)) + uint(z)); }
METALSIM_FUNCTION uint mad24(uint x, uint y, uint z) { return mul24(x, y) + z; }

METALSIM_ELEMENTWISE_1(abs)
METALSIM_ELEMENTWISE_1(clz)
METALSIM_ELEMENTWISE_1(ctz)
METALSIM_ELEMENTWISE_1(popcount)
METALSIM_ELEMENTWISE_1(reverse_bits)
METALSIM_ELEMENTWISE_2(addsat)
METALSIM_ELEMENTWISE_2(hadd)
METALSIM_ELEMENTWISE_2(max)
METALSIM_ELEMENTWISE_2(min)
METALSIM_ELEMENTWISE_2(mul24)
METALSIM_ELEMENTWISE_2(mulhi)
METALSIM_ELEMENTWISE_2(rhadd)
METALSIM_ELEMENTWISE_2(rotate)
METALSIM_ELEMENTWISE_2(subsat)
METALSIM_ELEMENTWISE_3(clamp)
METALSIM_ELEMENTWISE_3(mad24)
METALSIM_ELEMENTWISE_3(madhi)
METALSIM_ELEMENTWISE_3(madsat)
METALSIM_ELEMENTWISE_3(max3)
METALSIM_ELEMENTWISE_3(median3)
METALSIM_ELEMENTWISE_3(min3)

// min, max and clamp belong to the functions that a user may ask to be fast or precise.
namespace precise {
using metal::abs;
using metal::clamp;
using metal::max;
using metal::min;
}  // namespace precise
namespace fast {
using metal::abs;
using metal::clamp;
using metal::max;
using metal::min;
}  // namespace fast

}  // namespace metal
