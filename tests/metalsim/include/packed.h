// packed_float3 and the like: components without padding, aligned as one component is.
#pragma once
#include "vector.h"

namespace metal {

// V stands here for argument-dependent lookup: it finds the operators of vectors for packed ones too.
template <class T, int N, class V = vec<T, N>>
struct packed_vec {
  using value_type = T;
  T s[N];

  packed_vec() = default;
  METALSIM_FUNCTION packed_vec(vec<T, N> v) {
    for (int i = 0; i < N; i++) s[i] = v.s[i];
  }
  template <class A, enable_if_t<::metalsim::is_number<A>, int> = 0>
  METALSIM_FUNCTION packed_vec(A a) : packed_vec(vec<T, N>(a)) {}
  template <class U, enable_if_t<!is_same_v<T, U>, int> = 0>
  METALSIM_FUNCTION explicit packed_vec(vec<U, N> v) : packed_vec(vec<T, N>(v)) {}
  template <class A, class B, class... Rest>
  METALSIM_FUNCTION packed_vec(const A &a, const B &b, const Rest &...rest) : packed_vec(vec<T, N>(a, b, rest...)) {}

  METALSIM_FUNCTION operator vec<T, N>() const {
    vec<T, N> v;
    for (int i = 0; i < N; i++) v.s[i] = s[i];
    return v;
  }
  template <class U, enable_if_t<!is_same_v<T, U>, int> = 0>
  METALSIM_FUNCTION explicit operator vec<U, N>() const {
    return vec<U, N>(vec<T, N>(*this));
  }
  METALSIM_FUNCTION T &operator[](size_t i) { return s[i]; }
  METALSIM_FUNCTION const T &operator[](size_t i) const { return s[i]; }
  METALSIM_FUNCTION packed_vec &operator+=(vec<T, N> b) { return *this = vec<T, N>(*this) + b; }
  METALSIM_FUNCTION packed_vec &operator-=(vec<T, N> b) { return *this = vec<T, N>(*this) - b; }
  METALSIM_FUNCTION packed_vec &operator*=(vec<T, N> b) { return *this = vec<T, N>(*this) * b; }
  METALSIM_FUNCTION packed_vec &operator/=(vec<T, N> b) { return *this = vec<T, N>(*this) / b; }
};

}  // namespace metal

namespace metalsim {
template <class T, int N>
struct components_of<metal::packed_vec<T, N>> : components_of<vec<T, N>> {};
}  // namespace metalsim

#define METALSIM_PACKED(T)                              \
  using packed_##T##2 = ::metal::packed_vec<T, 2>;      \
  using packed_##T##3 = ::metal::packed_vec<T, 3>;      \
  using packed_##T##4 = ::metal::packed_vec<T, 4>;      \
  namespace metal {                                     \
  using ::packed_##T##2;                                \
  using ::packed_##T##3;                                \
  using ::packed_##T##4;                                \
  }
METALSIM_INTEGER_TYPES(METALSIM_PACKED)
METALSIM_PACKED(bool)
METALSIM_PACKED(half)
METALSIM_PACKED(float)
METALSIM_PACKED(bfloat)
#undef METALSIM_PACKED
