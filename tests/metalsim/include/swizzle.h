// Every swizzle of vectors with two, three and four components: v.xy, v.bgr, v.wwww …
#pragma once
#include "type_traits.h"

namespace metal {
template <class T, int N>
struct vec;
}

namespace metalsim {

// The components I… of a vector of N components in whose place it lies. V is the vector they make: a template
// argument, so that argument-dependent lookup finds V's operators for swizzles too.
template <class V, int N, int... I>
struct swizzle;

template <class T, int M, int N, int... I>
struct swizzle<metal::vec<T, M>, N, I...> {
  using vector = metal::vec<T, M>;
  T components[N];

  METALSIM_FUNCTION constexpr operator vector() const { return vector(components[I]...); }
  METALSIM_FUNCTION constexpr T operator[](int i) const { return vector(*this)[i]; }
  METALSIM_FUNCTION swizzle &operator=(vector value) {  // writes no component but its own
    int i = 0;
    ((components[I] = value[i++]), ...);
    return *this;
  }
  METALSIM_FUNCTION swizzle &operator=(const swizzle &other) { return *this = vector(other); }
  METALSIM_FUNCTION swizzle &operator+=(vector b) { return *this = vector(*this) + b; }
  METALSIM_FUNCTION swizzle &operator-=(vector b) { return *this = vector(*this) - b; }
  METALSIM_FUNCTION swizzle &operator*=(vector b) { return *this = vector(*this) * b; }
  METALSIM_FUNCTION swizzle &operator/=(vector b) { return *this = vector(*this) / b; }
};

}  // namespace metalsim

// METALSIM_SWIZZLES(T, N) declares them as members of a union of vec<T, N>. The macros multiply out the choices
// for each position; a choice is a letter of xyzw, its twin of rgba, and its index.
#define METALSIM_SWIZZLE_2(T, N, a, a_, i, b, b_, j) \
  ::metalsim::swizzle<vec<T, 2>, N, i, j> a##b, a_##b_;
#define METALSIM_SWIZZLE_3(T, N, a, a_, i, b, b_, j, c, c_, k) \
  ::metalsim::swizzle<vec<T, 3>, N, i, j, k> a##b##c, a_##b_##c_;
#define METALSIM_SWIZZLE_4(T, N, a, a_, i, b, b_, j, c, c_, k, d, d_, l) \
  ::metalsim::swizzle<vec<T, 4>, N, i, j, k, l> a##b##c##d, a_##b_##c_##d_;

#define METALSIM_EACH_2(M, ...) M(__VA_ARGS__, x, r, 0) M(__VA_ARGS__, y, g, 1)
#define METALSIM_EACH_3(M, ...) METALSIM_EACH_2(M, __VA_ARGS__) M(__VA_ARGS__, z, b, 2)
#define METALSIM_EACH_4(M, ...) METALSIM_EACH_3(M, __VA_ARGS__) M(__VA_ARGS__, w, a, 3)
// A macro is not expanded inside itself, so each position has its own copy.
#define METALSIM_EACH_2_AGAIN(M, ...) M(__VA_ARGS__, x, r, 0) M(__VA_ARGS__, y, g, 1)
#define METALSIM_EACH_3_AGAIN(M, ...) METALSIM_EACH_2_AGAIN(M, __VA_ARGS__) M(__VA_ARGS__, z, b, 2)
#define METALSIM_EACH_4_AGAIN(M, ...) METALSIM_EACH_3_AGAIN(M, __VA_ARGS__) M(__VA_ARGS__, w, a, 3)
#define METALSIM_EACH_2_THIRD(M, ...) M(__VA_ARGS__, x, r, 0) M(__VA_ARGS__, y, g, 1)
#define METALSIM_EACH_3_THIRD(M, ...) METALSIM_EACH_2_THIRD(M, __VA_ARGS__) M(__VA_ARGS__, z, b, 2)
#define METALSIM_EACH_4_THIRD(M, ...) METALSIM_EACH_3_THIRD(M, __VA_ARGS__) M(__VA_ARGS__, w, a, 3)
#define METALSIM_EACH_2_FOURTH(M, ...) M(__VA_ARGS__, x, r, 0) M(__VA_ARGS__, y, g, 1)
#define METALSIM_EACH_3_FOURTH(M, ...) METALSIM_EACH_2_FOURTH(M, __VA_ARGS__) M(__VA_ARGS__, z, b, 2)
#define METALSIM_EACH_4_FOURTH(M, ...) METALSIM_EACH_3_FOURTH(M, __VA_ARGS__) M(__VA_ARGS__, w, a, 3)

#define METALSIM_PAIRS(T, N, ...) METALSIM_EACH_##N##_AGAIN(METALSIM_SWIZZLE_2, T, N, __VA_ARGS__)
#define METALSIM_TRIPLES(T, N, ...) METALSIM_EACH_##N##_AGAIN(METALSIM_TRIPLES_OF, T, N, __VA_ARGS__)
#define METALSIM_TRIPLES_OF(T, N, ...) METALSIM_EACH_##N##_THIRD(METALSIM_SWIZZLE_3, T, N, __VA_ARGS__)
#define METALSIM_QUADS(T, N, ...) METALSIM_EACH_##N##_AGAIN(METALSIM_QUADS_OF, T, N, __VA_ARGS__)
#define METALSIM_QUADS_OF(T, N, ...) METALSIM_EACH_##N##_THIRD(METALSIM_QUADS_OF_TWO, T, N, __VA_ARGS__)
#define METALSIM_QUADS_OF_TWO(T, N, ...) METALSIM_EACH_##N##_FOURTH(METALSIM_SWIZZLE_4, T, N, __VA_ARGS__)

#define METALSIM_SWIZZLES(T, N)           \
  METALSIM_EACH_##N(METALSIM_PAIRS, T, N) \
  METALSIM_EACH_##N(METALSIM_TRIPLES, T, N) \
  METALSIM_EACH_##N(METALSIM_QUADS, T, N)
