// <metal_common>, <metal_relational> and <metal_geometric>.
#pragma once
#include "integer.h"

namespace metal {

#define METALSIM_COMMON(T)                                                                       \
  METALSIM_FUNCTION T mix(T x, T y, T a) { return T(x + (y - x) * a); }                          \
  METALSIM_FUNCTION T saturate(T x) { return fmin(fmax(x, T(0)), T(1)); }                        \
  METALSIM_FUNCTION T sign(T x) { return x > T(0) ? T(1) : x < T(0) ? T(-1) : x == x ? x : T(0); } \
  METALSIM_FUNCTION T step(T edge, T x) { return x < edge ? T(0) : T(1); }                       \
  METALSIM_FUNCTION T smoothstep(T from, T to, T x) {                                            \
    const T t = saturate(T((x - from) / (to - from)));                                           \
    return T(t * t * (T(3) - T(2) * t));                                                         \
  }
METALSIM_COMMON(float)
METALSIM_COMMON(half)
#undef METALSIM_COMMON
METALSIM_ELEMENTWISE_1(saturate)
METALSIM_ELEMENTWISE_1(sign)
METALSIM_ELEMENTWISE_2(step)
METALSIM_ELEMENTWISE_3(mix)
METALSIM_ELEMENTWISE_3(smoothstep)

// ---- Relational. By the bits, so that fast math cannot take the answers away. ----

#define METALSIM_TESTS(T, bits_t, sign_bit, infinity)                                                        \
  METALSIM_FUNCTION bits_t metalsim_magnitude(T x) { return ::metalsim::same_bits<bits_t>(x) & ~sign_bit; }  \
  METALSIM_FUNCTION bool signbit(T x) { return (::metalsim::same_bits<bits_t>(x) & sign_bit) != 0; }         \
  METALSIM_FUNCTION bool isnan(T x) { return metalsim_magnitude(x) > infinity; }                             \
  METALSIM_FUNCTION bool isinf(T x) { return metalsim_magnitude(x) == infinity; }                            \
  METALSIM_FUNCTION bool isfinite(T x) { return metalsim_magnitude(x) < infinity; }                          \
  METALSIM_FUNCTION bool isnormal(T x) {                                                                     \
    constexpr bits_t least = infinity & -infinity; /* the lowest bit of the exponent */                      \
    return isfinite(x) && metalsim_magnitude(x) >= least;                                                    \
  }                                                                                                          \
  METALSIM_FUNCTION bool isunordered(T x, T y) { return isnan(x) || isnan(y); }                              \
  METALSIM_FUNCTION bool isordered(T x, T y) { return !isunordered(x, y); }
METALSIM_TESTS(float, uint, 0x80000000u, 0x7F800000u)
METALSIM_TESTS(half, ushort, 0x8000, 0x7C00)
#undef METALSIM_TESTS
METALSIM_ELEMENTWISE_TEST_1(isnan)
METALSIM_ELEMENTWISE_TEST_1(isinf)
METALSIM_ELEMENTWISE_TEST_1(isfinite)
METALSIM_ELEMENTWISE_TEST_1(isnormal)
METALSIM_ELEMENTWISE_TEST_1(signbit)
template <class A, class B, class V = ::metalsim::vector_of<A, B>>
METALSIM_FUNCTION vec<bool, V::N> isunordered(const A &x, const B &y) {
  return isnan(V(x)) || isnan(V(y));
}
template <class A, class B, class V = ::metalsim::vector_of<A, B>>
METALSIM_FUNCTION vec<bool, V::N> isordered(const A &x, const B &y) {
  return !isunordered(x, y);
}

template <int N>
METALSIM_FUNCTION bool any(vec<bool, N> x) {
  bool result = false;
  for (int i = 0; i < N; i++) result |= x.s[i];
  return result;
}
template <int N>
METALSIM_FUNCTION bool all(vec<bool, N> x) {
  bool result = true;
  for (int i = 0; i < N; i++) result &= x.s[i];
  return result;
}
METALSIM_FUNCTION bool any(bool x) { return x; }
METALSIM_FUNCTION bool all(bool x) { return x; }
METALSIM_FUNCTION bool not_(bool x) { return !x; }

template <class T, enable_if_t<::metalsim::is_number<T>, int> = 0>
METALSIM_FUNCTION T select(T if_false, type_identity_t<T> if_true, bool condition) {
  return condition ? if_true : if_false;
}
template <class A, class B, class V = ::metalsim::vector_of<A, B>>
METALSIM_FUNCTION V select(const A &if_false, const B &if_true, vec<bool, V::N> condition) {
  const V x = if_false, y = if_true;
  V result;
  for (int i = 0; i < V::N; i++) result.s[i] = condition.s[i] ? y.s[i] : x.s[i];
  return result;
}

// ---- Geometric ----

#define METALSIM_OF_TWO(result, name)                                             \
  template <class A, class B, class V = ::metalsim::vector_of<A, B>>              \
  METALSIM_FUNCTION result name(const A &a, const B &b)
#define METALSIM_OF_ONE(result, name)                                             \
  template <class A, class V = ::metalsim::vector_of<A>>                          \
  METALSIM_FUNCTION result name(const A &a)

METALSIM_OF_TWO(typename V::value_type, dot) {
  using T = typename V::value_type;
  const V x = a, y = b;
  T sum = T(x.s[0] * y.s[0]);
  for (int i = 1; i < V::N; i++) sum = T(sum + x.s[i] * y.s[i]);
  return sum;
}
METALSIM_OF_ONE(typename V::value_type, length_squared) { return dot(V(a), V(a)); }
METALSIM_OF_ONE(typename V::value_type, length) { return sqrt(dot(V(a), V(a))); }
METALSIM_OF_TWO(typename V::value_type, distance_squared) { return length_squared(V(a) - V(b)); }
METALSIM_OF_TWO(typename V::value_type, distance) { return length(V(a) - V(b)); }
METALSIM_OF_ONE(V, normalize) { return V(a) * V(rsqrt(length_squared(V(a)))); }
METALSIM_OF_TWO(V, cross) {
  const V x = a, y = b;
  return V(x.y * y.z - x.z * y.y, x.z * y.x - x.x * y.z, x.x * y.y - x.y * y.x);
}
METALSIM_OF_TWO(V, reflect) { return V(a) - V(b) * V(2 * dot(V(b), V(a))); }
template <class A, class B, class V = ::metalsim::vector_of<A, B>>
METALSIM_FUNCTION V refract(const A &incident, const B &normal, typename V::value_type eta) {
  using T = typename V::value_type;
  const V i = incident, n = normal;
  const T cosine = dot(n, i), k = T(1) - eta * eta * (T(1) - cosine * cosine);
  return k < T(0) ? V(T(0)) : V(eta) * i - V(T(eta * cosine + sqrt(k))) * n;
}
template <class A, class B, class C, class V = ::metalsim::vector_of<A, B, C>>
METALSIM_FUNCTION V faceforward(const A &normal, const B &incident, const C &reference) {
  return dot(V(incident), V(reference)) < 0 ? V(normal) : -V(normal);
}
#undef METALSIM_OF_TWO
#undef METALSIM_OF_ONE

#define METALSIM_BOTH_WAYS                                                                                  \
  using metal::cross; using metal::distance; using metal::distance_squared; using metal::dot;               \
  using metal::length; using metal::length_squared; using metal::mix; using metal::normalize;               \
  using metal::saturate; using metal::smoothstep;
namespace precise { METALSIM_BOTH_WAYS }
namespace fast { METALSIM_BOTH_WAYS }
#undef METALSIM_BOTH_WAYS

}  // namespace metal
