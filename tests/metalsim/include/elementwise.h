// How a function of numbers becomes one of vectors.
#pragma once
#include "packed.h"

namespace metalsim {

template <class... A>
struct first_vector {};
template <class A, class... Rest>
struct first_vector<A, Rest...> : first_vector<Rest...> {};
template <class T, int N, class... Rest>
struct first_vector<vec<T, N>, Rest...> {
  using type = vec<T, N>;
};
template <class T, int M, int N, int... I, class... Rest>
struct first_vector<swizzle<vec<T, M>, N, I...>, Rest...> {
  using type = vec<T, M>;
};
template <class T, int N, class... Rest>
struct first_vector<metal::packed_vec<T, N>, Rest...> {
  using type = vec<T, N>;
};

template <class V, class... A>
constexpr bool all_become = ((is_number<A> || (is_vector<A> && metal::is_convertible_v<A, V>)) && ...);

// The vector type of a call's arguments: some are vectors of one type, the others numbers, which are spread over
// the components. No type, and so no such function, for other arguments.
template <class... A>
using vector_of = typename only<all_become<typename first_vector<A...>::type, A...>, first_vector<A...>>::type::type;

template <class V, class W>
using vector_like = vec<typename components_of<V>::type, components_of<W>::count>;

}  // namespace metalsim

// name(vector) and so on from name(number), which must be declared before.
#define METALSIM_ELEMENTWISE_1(name)                                                  \
  template <class A, class V = ::metalsim::vector_of<A>>                              \
  METALSIM_FUNCTION V name(const A &a) {                                              \
    const V x = a;                                                                    \
    V result;                                                                         \
    for (int i = 0; i < V::N; i++) result.s[i] = name(x.s[i]);                        \
    return result;                                                                    \
  }
#define METALSIM_ELEMENTWISE_2(name)                                                  \
  template <class A, class B, class V = ::metalsim::vector_of<A, B>>                  \
  METALSIM_FUNCTION V name(const A &a, const B &b) {                                  \
    const V x = a, y = b;                                                             \
    V result;                                                                         \
    for (int i = 0; i < V::N; i++) result.s[i] = name(x.s[i], y.s[i]);                \
    return result;                                                                    \
  }
#define METALSIM_ELEMENTWISE_3(name)                                                  \
  template <class A, class B, class C, class V = ::metalsim::vector_of<A, B, C>>      \
  METALSIM_FUNCTION V name(const A &a, const B &b, const C &c) {                      \
    const V x = a, y = b, z = c;                                                      \
    V result;                                                                         \
    for (int i = 0; i < V::N; i++) result.s[i] = name(x.s[i], y.s[i], z.s[i]);        \
    return result;                                                                    \
  }
// The same for functions that give a truth value for each component.
#define METALSIM_ELEMENTWISE_TEST_1(name)                                             \
  template <class A, class V = ::metalsim::vector_of<A>>                              \
  METALSIM_FUNCTION vec<bool, V::N> name(const A &a) {                                \
    const V x = a;                                                                    \
    vec<bool, V::N> result;                                                           \
    for (int i = 0; i < V::N; i++) result.s[i] = name(x.s[i]);                        \
    return result;                                                                    \
  }
