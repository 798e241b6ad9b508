// vec<T, N>: float4, half2, uint3, bool4 …
#pragma once
#include "swizzle.h"

namespace metalsim {

using metal::enable_if_t;
using metal::vec;

template <class T>
struct stored_as {
  using type = T;
};
template <>
struct stored_as<bool> {
  using type = uchar;
};
template <>
struct stored_as<bfloat> {
  using type = ushort;
};
// What one load or store of a vector moves.
template <class T, int N>
using native = typename stored_as<T>::type __attribute__((ext_vector_type(N)));
template <class T>
constexpr bool is_native = __is_same(typename stored_as<T>::type, T);

template <class T>
constexpr bool is_number = metal::is_arithmetic_v<metal::remove_cv_t<T>>;

// The number and type of the components of a vector, a swizzle, a packed vector (packed.h) or a number.
template <class A>
struct components_of {
  static constexpr int count = is_number<A> ? 1 : 0;
  static constexpr bool is_vector = false;
  using type = A;
};
template <class T, int N>
struct components_of<vec<T, N>> {
  static constexpr int count = N;
  static constexpr bool is_vector = true;
  using type = T;
};
template <class T, int M, int N, int... I>
struct components_of<swizzle<vec<T, M>, N, I...>> : components_of<vec<T, M>> {};

template <class A>
constexpr int count_of = components_of<metal::remove_cv_t<A>>::count;
template <class A>
constexpr bool is_vector = components_of<metal::remove_cv_t<A>>::is_vector;

template <class... A>
constexpr int total_of = (count_of<A> + ... + 0);
template <class... A>
constexpr bool all_count = ((count_of<A> > 0) && ...);

// Component i of several vectors and numbers one behind the other.
template <int I, class A, class... Rest>
METALSIM_FUNCTION constexpr auto component(const A &a, const Rest &...rest) {
  if constexpr (I >= count_of<A>) {
    return component<I - count_of<A>>(rest...);
  } else if constexpr (!is_vector<A>) {
    return a;
  } else {
    const vec<typename components_of<A>::type, count_of<A>> v = a;
    return v.template get<I>();
  }
}

// The storage of a vector. Copies go through `v`, so that each is one access of memory to the checks and counters.
template <class T, int N>
struct vector_storage;

#define METALSIM_COPIES(...)                                                                                   \
  vector_storage() = default;                                                                                  \
  METALSIM_FUNCTION vector_storage &operator=(const vector_storage &o) {                                       \
    v = o.v;                                                                                                   \
    return *this;                                                                                              \
  }                                                                                                            \
  METALSIM_FUNCTION explicit vector_storage(native<T, N> native_) : v(native_) {}

// A constant expression may read only the member that was written, which is the structure of components.
#define METALSIM_AT_COMPILE_TIME(component) (__builtin_is_constant_evaluated() ? o.component : T())

template <class T>
struct vector_storage<T, 2> {
  static constexpr int N = 2;
  union {
    struct { T x, y; };
    struct { T r, g; };
    T s[2];
    native<T, 2> v;
    METALSIM_SWIZZLES(T, 2)
  };
  METALSIM_COPIES()
  METALSIM_FUNCTION constexpr vector_storage(T x_, T y_) : x(x_), y(y_) {}
  METALSIM_FUNCTION constexpr vector_storage(const vector_storage &o)
      : x(METALSIM_AT_COMPILE_TIME(x)), y(METALSIM_AT_COMPILE_TIME(y)) {
    if (!__builtin_is_constant_evaluated()) v = o.v;
  }
  template <int I>
  METALSIM_FUNCTION constexpr T get() const {
    if constexpr (I == 0) return x;
    else return y;
  }
};

template <class T>
struct vector_storage<T, 3> {
  static constexpr int N = 3;
  union {
    struct { T x, y, z; };
    struct { T r, g, b; };
    T s[3];
    native<T, 3> v;
    METALSIM_SWIZZLES(T, 3)
  };
  METALSIM_COPIES()
  METALSIM_FUNCTION constexpr vector_storage(T x_, T y_, T z_) : x(x_), y(y_), z(z_) {}
  METALSIM_FUNCTION constexpr vector_storage(const vector_storage &o)
      : x(METALSIM_AT_COMPILE_TIME(x)), y(METALSIM_AT_COMPILE_TIME(y)), z(METALSIM_AT_COMPILE_TIME(z)) {
    if (!__builtin_is_constant_evaluated()) v = o.v;
  }
  template <int I>
  METALSIM_FUNCTION constexpr T get() const {
    if constexpr (I == 0) return x;
    else if constexpr (I == 1) return y;
    else return z;
  }
};

template <class T>
struct vector_storage<T, 4> {
  static constexpr int N = 4;
  union {
    struct { T x, y, z, w; };
    struct { T r, g, b, a; };
    T s[4];
    native<T, 4> v;
    METALSIM_SWIZZLES(T, 4)
  };
  METALSIM_COPIES()
  METALSIM_FUNCTION constexpr vector_storage(T x_, T y_, T z_, T w_) : x(x_), y(y_), z(z_), w(w_) {}
  METALSIM_FUNCTION constexpr vector_storage(const vector_storage &o)
      : x(METALSIM_AT_COMPILE_TIME(x)), y(METALSIM_AT_COMPILE_TIME(y)),
        z(METALSIM_AT_COMPILE_TIME(z)), w(METALSIM_AT_COMPILE_TIME(w)) {
    if (!__builtin_is_constant_evaluated()) v = o.v;
  }
  template <int I>
  METALSIM_FUNCTION constexpr T get() const {
    if constexpr (I == 0) return x;
    else if constexpr (I == 1) return y;
    else if constexpr (I == 2) return z;
    else return w;
  }
};
#undef METALSIM_COPIES
#undef METALSIM_AT_COMPILE_TIME

template <int N, class V>
METALSIM_FUNCTION vec<bool, N> truth(V v) {  // from the 0 and -1 of a native comparison
  return vec<bool, N>(__builtin_convertvector(v, native<bool, N>) & (uchar)1);
}

}  // namespace metalsim

namespace metal {

// An operator on components; natively unless the components are stored as something else.
#define METALSIM_BINARY(op)                                                                  \
  METALSIM_FUNCTION friend vec operator op(vec a, vec b) {                                   \
    if constexpr (::metalsim::is_native<T>) return vec(a.v op b.v);                          \
    vec result;                                                                              \
    for (int i = 0; i < N; i++) result.s[i] = T(a.s[i] op b.s[i]);                           \
    return result;                                                                           \
  }                                                                                          \
  METALSIM_FUNCTION friend vec &operator op##=(vec &a, vec b) { return a = a op b; }
#define METALSIM_COMPARISON(op)                                                              \
  METALSIM_FUNCTION friend vec<bool, N> operator op(vec a, vec b) {                          \
    if constexpr (::metalsim::is_native<T>) return ::metalsim::truth<N>(a.v op b.v);         \
    vec<bool, N> result;                                                                     \
    for (int i = 0; i < N; i++) result.s[i] = a.s[i] op b.s[i];                              \
    return result;                                                                           \
  }

template <class T, int N>
struct vec : ::metalsim::vector_storage<T, N> {
  using storage = ::metalsim::vector_storage<T, N>;
  using value_type = T;

  vec() = default;
  METALSIM_FUNCTION explicit vec(::metalsim::native<T, N> native) : storage(native) {}
  template <class A, enable_if_t<::metalsim::is_number<A>, int> = 0>
  METALSIM_FUNCTION constexpr vec(A a) : vec(make_index_sequence<N>(), a) {}
  template <class U, enable_if_t<!is_same_v<T, U>, int> = 0>
  METALSIM_FUNCTION constexpr explicit vec(const vec<U, N> &a)
      : vec(make_index_sequence<1>(), make_index_sequence<N>(), a) {}
  template <class U, int M, int... I, enable_if_t<!is_same_v<T, U>, int> = 0>
  METALSIM_FUNCTION constexpr explicit vec(const ::metalsim::swizzle<vec<U, N>, M, I...> &a) : vec(vec<U, N>(a)) {}
  template <class A, class B, class... Rest,
            enable_if_t<::metalsim::all_count<A, B, Rest...> && ::metalsim::total_of<A, B, Rest...> == N, int> = 0>
  METALSIM_FUNCTION constexpr vec(const A &a, const B &b, const Rest &...rest)
      : vec(make_index_sequence<1>(), make_index_sequence<N>(), a, b, rest...) {}

  METALSIM_FUNCTION constexpr T &operator[](size_t i) { return this->s[i]; }
  METALSIM_FUNCTION constexpr const T &operator[](size_t i) const { return this->s[i]; }

  METALSIM_BINARY(+)
  METALSIM_BINARY(-)
  METALSIM_BINARY(*)
  METALSIM_BINARY(/)
  METALSIM_BINARY(%)
  METALSIM_BINARY(&)
  METALSIM_BINARY(|)
  METALSIM_BINARY(^)
  METALSIM_BINARY(<<)
  METALSIM_BINARY(>>)
  METALSIM_COMPARISON(<)
  METALSIM_COMPARISON(>)
  METALSIM_COMPARISON(<=)
  METALSIM_COMPARISON(>=)
  METALSIM_COMPARISON(==)
  METALSIM_COMPARISON(!=)
  METALSIM_FUNCTION friend vec operator+(vec a) { return a; }
  METALSIM_FUNCTION friend vec operator-(vec a) {
    if constexpr (::metalsim::is_native<T>) return vec(-a.v);
    else return a * vec(T(-1));
  }
  METALSIM_FUNCTION friend vec operator~(vec a) { return vec(~a.v); }
  METALSIM_FUNCTION friend vec<bool, N> operator!(vec a) { return vec<bool, N>(a) == vec<bool, N>(false); }
  METALSIM_FUNCTION friend vec<bool, N> operator&&(vec a, vec b) { return vec<bool, N>(a) & vec<bool, N>(b); }
  METALSIM_FUNCTION friend vec<bool, N> operator||(vec a, vec b) { return vec<bool, N>(a) | vec<bool, N>(b); }
  METALSIM_FUNCTION friend vec &operator++(vec &a) { return a = a + vec(T(1)); }
  METALSIM_FUNCTION friend vec &operator--(vec &a) { return a = a - vec(T(1)); }

 private:
  template <size_t... I, class A>
  METALSIM_FUNCTION constexpr vec(index_sequence<I...>, A a) : storage((void(I), T(a))...) {}
  template <size_t... I, class... A>
  METALSIM_FUNCTION constexpr vec(index_sequence<0>, index_sequence<I...>, const A &...a)
      : storage(T(::metalsim::component<I>(a...))...) {}
};
#undef METALSIM_BINARY
#undef METALSIM_COMPARISON

}  // namespace metal

#define METALSIM_VECTORS(T)           \
  using T##2 = ::metal::vec<T, 2>;    \
  using T##3 = ::metal::vec<T, 3>;    \
  using T##4 = ::metal::vec<T, 4>;    \
  namespace metal {                   \
  using ::T##2;                       \
  using ::T##3;                       \
  using ::T##4;                       \
  }
METALSIM_INTEGER_TYPES(METALSIM_VECTORS)
METALSIM_VECTORS(bool)
METALSIM_VECTORS(half)
METALSIM_VECTORS(float)
METALSIM_VECTORS(bfloat)
#undef METALSIM_VECTORS
