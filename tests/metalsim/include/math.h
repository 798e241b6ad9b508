// <metal_math>: functions of float and half, and of vectors of them. A half is computed in float and rounded once.
#pragma once
#include "elementwise.h"

namespace metalsim {

METALSIM_FUNCTION float exp10(float x) { return float(__builtin_exp2(3.321928094887362348 * double(x))); }
METALSIM_FUNCTION float rsqrt(float x) { return 1.0f / __builtin_sqrtf(x); }
METALSIM_FUNCTION float fract(float x) {  // below one, also for tiny negative x
  return __builtin_fminf(x - __builtin_floorf(x), 0x1.fffffep-1f);
}
// Of angles in half turns. Multiples of a quarter turn give exactly 0, 1 and -1.
METALSIM_FUNCTION float turned(float x) {  // to -1 … 1, exactly
  return x - 2.0f * __builtin_rintf(0.5f * x);
}
METALSIM_FUNCTION float sinpi(float x) {
  const float r = turned(x), to_axis = __builtin_fabsf(r) > 0.5f ? __builtin_copysignf(1.0f, r) - r : r;
  return float(__builtin_sin(3.141592653589793 * double(to_axis)));
}
METALSIM_FUNCTION float cospi(float x) {
  return float(__builtin_sin(3.141592653589793 * (0.5 - double(__builtin_fabsf(turned(x))))));
}
METALSIM_FUNCTION float tanpi(float x) { return sinpi(x) / cospi(x); }
METALSIM_FUNCTION float divide(float x, float y) { return x / y; }
METALSIM_FUNCTION float median(float x, float y, float z) {
  return __builtin_fmaxf(__builtin_fminf(x, y), __builtin_fminf(__builtin_fmaxf(x, y), z));
}

}  // namespace metalsim

namespace metal {

#define METALSIM_MATH_1(name, function)                                                        \
  METALSIM_FUNCTION float name(float x) { return function(x); }                                \
  METALSIM_FUNCTION half name(half x) { return half(function(float(x))); }                     \
  METALSIM_ELEMENTWISE_1(name)
#define METALSIM_MATH_2(name, function)                                                        \
  METALSIM_FUNCTION float name(float x, float y) { return function(x, y); }                    \
  METALSIM_FUNCTION half name(half x, half y) { return half(function(float(x), float(y))); }   \
  METALSIM_ELEMENTWISE_2(name)
#define METALSIM_MATH_3(name, function)                                                                      \
  METALSIM_FUNCTION float name(float x, float y, float z) { return function(x, y, z); }                      \
  METALSIM_FUNCTION half name(half x, half y, half z) { return half(function(float(x), float(y), float(z))); } \
  METALSIM_ELEMENTWISE_3(name)

METALSIM_MATH_1(acos, __builtin_acosf)
METALSIM_MATH_1(acosh, __builtin_acoshf)
METALSIM_MATH_1(asin, __builtin_asinf)
METALSIM_MATH_1(asinh, __builtin_asinhf)
METALSIM_MATH_1(atan, __builtin_atanf)
METALSIM_MATH_1(atanh, __builtin_atanhf)
METALSIM_MATH_1(ceil, __builtin_ceilf)
METALSIM_MATH_1(cos, __builtin_cosf)
METALSIM_MATH_1(cosh, __builtin_coshf)
METALSIM_MATH_1(cospi, ::metalsim::cospi)
METALSIM_MATH_1(exp, __builtin_expf)
METALSIM_MATH_1(exp2, __builtin_exp2f)
METALSIM_MATH_1(exp10, ::metalsim::exp10)
METALSIM_MATH_1(fabs, __builtin_fabsf)
METALSIM_MATH_1(floor, __builtin_floorf)
METALSIM_MATH_1(fract, ::metalsim::fract)
METALSIM_MATH_1(log, __builtin_logf)
METALSIM_MATH_1(log2, __builtin_log2f)
METALSIM_MATH_1(log10, __builtin_log10f)
METALSIM_MATH_1(rint, __builtin_rintf)
METALSIM_MATH_1(round, __builtin_roundf)
METALSIM_MATH_1(rsqrt, ::metalsim::rsqrt)
METALSIM_MATH_1(sin, __builtin_sinf)
METALSIM_MATH_1(sinh, __builtin_sinhf)
METALSIM_MATH_1(sinpi, ::metalsim::sinpi)
METALSIM_MATH_1(sqrt, __builtin_sqrtf)
METALSIM_MATH_1(tan, __builtin_tanf)
METALSIM_MATH_1(tanh, __builtin_tanhf)
METALSIM_MATH_1(tanpi, ::metalsim::tanpi)
METALSIM_MATH_1(trunc, __builtin_truncf)
METALSIM_MATH_2(atan2, __builtin_atan2f)
METALSIM_MATH_2(copysign, __builtin_copysignf)
METALSIM_MATH_2(divide, ::metalsim::divide)
METALSIM_MATH_2(fdim, __builtin_fdimf)
METALSIM_MATH_2(fmax, __builtin_fmaxf)
METALSIM_MATH_2(fmin, __builtin_fminf)
METALSIM_MATH_2(fmod, __builtin_fmodf)
METALSIM_MATH_2(pow, __builtin_powf)
METALSIM_MATH_2(powr, __builtin_powf)
METALSIM_MATH_3(fmedian3, ::metalsim::median)

METALSIM_FUNCTION float fma(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
METALSIM_FUNCTION half fma(half x, half y, half z) {  // exact in double but for the last rounding
  return half(__builtin_fma(double(x), double(y), double(z)));
}
METALSIM_ELEMENTWISE_3(fma)
METALSIM_FUNCTION float fmax3(float x, float y, float z) { return fmax(fmax(x, y), z); }
METALSIM_FUNCTION half fmax3(half x, half y, half z) { return fmax(fmax(x, y), z); }
METALSIM_ELEMENTWISE_3(fmax3)
METALSIM_FUNCTION float fmin3(float x, float y, float z) { return fmin(fmin(x, y), z); }
METALSIM_FUNCTION half fmin3(half x, half y, half z) { return fmin(fmin(x, y), z); }
METALSIM_ELEMENTWISE_3(fmin3)
METALSIM_FUNCTION float nextafter(float x, float y) { return __builtin_nextafterf(x, y); }
METALSIM_FUNCTION half nextafter(half x, half y) {
  if (x != x || y != y) return half(__builtin_nanf(""));
  if (x == y) return y;
  const short bits = ::metalsim::same_bits<short>(x);
  if (x == half(0.0f)) return ::metalsim::same_bits<half>(ushort(y < x ? 0x8001 : 1));
  return ::metalsim::same_bits<half>(short(bits + ((x < y) == (bits > 0) ? 1 : -1)));
}
METALSIM_ELEMENTWISE_2(nextafter)

// Functions with integer results or arguments, and functions with two results.
#define METALSIM_EXPONENTS(T)                                                                            \
  METALSIM_FUNCTION T ldexp(T x, int k) { return T(__builtin_ldexp(double(x), k)); }                     \
  METALSIM_FUNCTION int ilogb(T x) { return __builtin_ilogbf(float(x)); }                                \
  METALSIM_FUNCTION T frexp(T x, int &exponent) { return T(__builtin_frexpf(float(x), &exponent)); } \
  METALSIM_FUNCTION T modf(T x, T &whole) {                                                       \
    whole = trunc(x);                                                                                    \
    return copysign(x == whole ? T(0) : T(x - whole), x);                                                \
  }                                                                                                      \
  METALSIM_FUNCTION T sincos(T x, T &cosine) {                                                    \
    cosine = cos(x);                                                                                     \
    return sin(x);                                                                                       \
  }                                                                                                      \
  template <int N>                                                                                       \
  METALSIM_FUNCTION vec<T, N> ldexp(vec<T, N> x, vec<int, N> k) {                                        \
    for (int i = 0; i < N; i++) x.s[i] = ldexp(x.s[i], k.s[i]);                                          \
    return x;                                                                                            \
  }                                                                                                      \
  template <int N>                                                                                       \
  METALSIM_FUNCTION vec<int, N> ilogb(vec<T, N> x) {                                                     \
    vec<int, N> result;                                                                                  \
    for (int i = 0; i < N; i++) result.s[i] = ilogb(x.s[i]);                                             \
    return result;                                                                                       \
  }                                                                                                      \
  template <int N>                                                                                       \
  METALSIM_FUNCTION vec<T, N> frexp(vec<T, N> x, vec<int, N> &exponent) {                         \
    for (int i = 0; i < N; i++) x.s[i] = frexp(x.s[i], exponent.s[i]);                                   \
    return x;                                                                                            \
  }                                                                                                      \
  template <int N>                                                                                       \
  METALSIM_FUNCTION vec<T, N> modf(vec<T, N> x, vec<T, N> &whole) {                               \
    for (int i = 0; i < N; i++) x.s[i] = modf(x.s[i], whole.s[i]);                                       \
    return x;                                                                                            \
  }                                                                                                      \
  template <int N>                                                                                       \
  METALSIM_FUNCTION vec<T, N> sincos(vec<T, N> x, vec<T, N> &cosine) {                            \
    cosine = cos(x);                                                                                     \
    return sin(x);                                                                                       \
  }
METALSIM_EXPONENTS(float)
METALSIM_EXPONENTS(half)
#undef METALSIM_EXPONENTS
#undef METALSIM_MATH_1
#undef METALSIM_MATH_2
#undef METALSIM_MATH_3

// Here the fast functions are as exact as the precise ones.
#define METALSIM_BOTH_WAYS                                                                                          \
  using metal::acos; using metal::acosh; using metal::asin; using metal::asinh; using metal::atan;                  \
  using metal::atan2; using metal::atanh; using metal::ceil; using metal::copysign; using metal::cos;               \
  using metal::cosh; using metal::cospi; using metal::divide; using metal::exp; using metal::exp10;                 \
  using metal::exp2; using metal::fabs; using metal::fdim; using metal::floor; using metal::fma; using metal::fmax; \
  using metal::fmax3; using metal::fmedian3; using metal::fmin; using metal::fmin3; using metal::fmod;              \
  using metal::fract; using metal::frexp; using metal::ilogb; using metal::ldexp; using metal::log;                 \
  using metal::log10; using metal::log2; using metal::modf; using metal::nextafter; using metal::pow;               \
  using metal::powr; using metal::rint; using metal::round; using metal::rsqrt; using metal::sin;                   \
  using metal::sincos; using metal::sinh; using metal::sinpi; using metal::sqrt; using metal::tan;                  \
  using metal::tanh; using metal::tanpi; using metal::trunc;
namespace precise { METALSIM_BOTH_WAYS }
namespace fast { METALSIM_BOTH_WAYS }
#undef METALSIM_BOTH_WAYS

}  // namespace metal
