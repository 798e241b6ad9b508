// Scalar types of Metal, and as_type.
#pragma once

// Debug information ends at these functions, so that messages name the line of the kernel that calls them.
#define METALSIM_FUNCTION inline __attribute__((always_inline, nodebug))

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef char int8_t;
typedef uchar uint8_t;
typedef short int16_t;
typedef ushort uint16_t;
typedef int int32_t;
typedef uint uint32_t;
typedef long int64_t;
typedef ulong uint64_t;
typedef ulong size_t;
typedef long ptrdiff_t;
typedef ulong uintptr_t;
typedef long intptr_t;
typedef _Float16 half;

#define METALSIM_INTEGER_TYPES(M) M(char) M(uchar) M(short) M(ushort) M(int) M(uint) M(long) M(ulong)

namespace metalsim {

template <class To, class From>
METALSIM_FUNCTION To same_bits(const From &from) {
  static_assert(sizeof(To) == sizeof(From), "as_type needs two types of one size");
  To to;
  __builtin_memcpy((void *)&to, (const void *)&from, sizeof(To));
  return to;
}

// The upper half of a float's bits, rounded to nearest even; a NaN stays one.
METALSIM_FUNCTION constexpr ushort bfloat_bits(float x) {
  const uint bits = __builtin_bit_cast(uint, x);
  if (x != x) return ushort(bits >> 16 | 0x40);
  return ushort((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

}  // namespace metalsim

namespace metalsim {

template <bool B, class T = void>
struct only {};
template <class T>
struct only<true, T> {
  using type = T;
};

}  // namespace metalsim

// A class, since clang's __bf16 cannot be cast to and from _Float16. Products and sums are rounded one by one.
// It becomes float by itself, and another number by a cast: so `x ? bfloat(1) : 0` has one meaning.
struct bfloat {
  ushort bits;

  bfloat() = default;
  METALSIM_FUNCTION constexpr bfloat(float x) : bits(metalsim::bfloat_bits(x)) {}
  METALSIM_FUNCTION explicit constexpr bfloat(half x) : bfloat(float(x)) {}
#define METALSIM_FROM(T) \
  METALSIM_FUNCTION constexpr bfloat(T x) : bfloat(float(x)) {}
  METALSIM_INTEGER_TYPES(METALSIM_FROM)
  METALSIM_FROM(bool)
#undef METALSIM_FROM
  template <class T, typename metalsim::only<__is_same(T, float), int>::type = 0>
  METALSIM_FUNCTION constexpr operator T() const {
    return __builtin_bit_cast(float, uint(bits) << 16);
  }
  template <class T, typename metalsim::only<__is_integral(T) || __is_same(T, half), int>::type = 0>
  METALSIM_FUNCTION explicit constexpr operator T() const {
    return T(float(*this));
  }
};

namespace metalsim {

template <class T>
constexpr bool is_bfloat = __is_same(__remove_cv(T), bfloat);
// bfloat with bfloat, or with an integer, is bfloat. With float it becomes float by its conversion.
template <class A, class B>
using bfloat_result = typename only<
    (is_bfloat<A> && (is_bfloat<B> || __is_integral(B))) || (is_bfloat<B> && __is_integral(A)), bfloat>::type;

}  // namespace metalsim

#define METALSIM_BFLOAT_OPERATOR(op)                                              \
  template <class A, class B>                                                     \
  METALSIM_FUNCTION constexpr metalsim::bfloat_result<A, B> operator op(A a, B b) { \
    return bfloat(float(a) op float(b));                                          \
  }                                                                               \
  template <class B>                                                              \
  METALSIM_FUNCTION constexpr bfloat &operator op##=(bfloat &a, B b) {            \
    return a = bfloat(float(a) op float(b));                                      \
  }
METALSIM_BFLOAT_OPERATOR(+)
METALSIM_BFLOAT_OPERATOR(-)
METALSIM_BFLOAT_OPERATOR(*)
METALSIM_BFLOAT_OPERATOR(/)
#undef METALSIM_BFLOAT_OPERATOR
#define METALSIM_BFLOAT_COMPARISON(op)                                                                      \
  template <class A, class B>                                                                               \
  METALSIM_FUNCTION constexpr typename metalsim::only<metalsim::is_bfloat<A> && metalsim::is_bfloat<B>, bool>::type \
  operator op(A a, B b) {                                                                                   \
    return float(a) op float(b);                                                                            \
  }
METALSIM_BFLOAT_COMPARISON(<)
METALSIM_BFLOAT_COMPARISON(>)
METALSIM_BFLOAT_COMPARISON(<=)
METALSIM_BFLOAT_COMPARISON(>=)
METALSIM_BFLOAT_COMPARISON(==)
METALSIM_BFLOAT_COMPARISON(!=)
#undef METALSIM_BFLOAT_COMPARISON
template <class A>
METALSIM_FUNCTION constexpr metalsim::bfloat_result<A, A> operator-(A a) {
  return bfloat(-float(a));
}

namespace metal {
using ::bfloat;
using ::half;
using ::int16_t;
using ::int32_t;
using ::int64_t;
using ::int8_t;
using ::ptrdiff_t;
using ::size_t;
using ::uchar;
using ::uint;
using ::uint16_t;
using ::uint32_t;
using ::uint64_t;
using ::uint8_t;
using ::ulong;
using ::ushort;
}  // namespace metal

template <class To, class From>
METALSIM_FUNCTION To as_type(const From &from) {
  return metalsim::same_bits<To>(from);
}
