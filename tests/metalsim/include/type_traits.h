// <metal_type_traits>
#pragma once
#include "types.h"

namespace metal {

template <class T, T v>
struct integral_constant {
  static constexpr T value = v;
  using value_type = T;
  using type = integral_constant;
  METALSIM_FUNCTION constexpr operator T() const { return v; }
  METALSIM_FUNCTION constexpr T operator()() const { return v; }
};
template <bool B>
using bool_constant = integral_constant<bool, B>;
using true_type = bool_constant<true>;
using false_type = bool_constant<false>;

template <bool B, class T = void>
struct enable_if {};
template <class T>
struct enable_if<true, T> {
  using type = T;
};
template <bool B, class T = void>
using enable_if_t = typename enable_if<B, T>::type;

template <bool B, class T, class F>
struct conditional {
  using type = T;
};
template <class T, class F>
struct conditional<false, T, F> {
  using type = F;
};
template <bool B, class T, class F>
using conditional_t = typename conditional<B, T, F>::type;

// Defines trait_name<T…> as a class and trait_name_v<T…> as its value.
#define METALSIM_TRAIT(name, value_of_T)             \
  template <class T>                                 \
  struct name : bool_constant<(value_of_T)> {};      \
  template <class T>                                 \
  constexpr bool name##_v = name<T>::value;
#define METALSIM_TRAIT_OF_TWO(name, value_of_T_U)    \
  template <class T, class U>                        \
  struct name : bool_constant<(value_of_T_U)> {};    \
  template <class T, class U>                        \
  constexpr bool name##_v = name<T, U>::value;
// Defines the class name<T> with a type, and name_t<T>.
#define METALSIM_TYPE(name, type_of_T)               \
  template <class T>                                 \
  struct name {                                      \
    using type = type_of_T;                          \
  };                                                 \
  template <class T>                                 \
  using name##_t = typename name<T>::type;

METALSIM_TYPE(remove_cv, __remove_cv(T))
METALSIM_TYPE(remove_const, __remove_const(T))
METALSIM_TYPE(remove_volatile, __remove_volatile(T))
METALSIM_TYPE(remove_reference, __remove_reference_t(T))
METALSIM_TYPE(remove_pointer, __remove_pointer(T))
METALSIM_TYPE(remove_addrspace, T)
METALSIM_TYPE(decay, __decay(T))
METALSIM_TYPE(make_signed, __make_signed(T))
METALSIM_TYPE(make_unsigned, __make_unsigned(T))
METALSIM_TYPE(add_const, const T)
METALSIM_TYPE(type_identity, T)

METALSIM_TRAIT_OF_TWO(is_same, __is_same(T, U))
METALSIM_TRAIT_OF_TWO(is_convertible, __is_convertible(T, U))
METALSIM_TRAIT_OF_TWO(is_base_of, __is_base_of(T, U))
METALSIM_TRAIT(is_void, __is_void(T))
METALSIM_TRAIT(is_integral, __is_integral(T))
METALSIM_TRAIT(is_floating_point, __is_floating_point(T) || metalsim::is_bfloat<T>)
METALSIM_TRAIT(is_arithmetic, is_integral_v<T> || is_floating_point_v<T>)
METALSIM_TRAIT(is_scalar, is_arithmetic_v<T> || __is_enum(T) || __is_pointer(T))
METALSIM_TRAIT(is_signed, is_floating_point_v<T> || __is_signed(T))
METALSIM_TRAIT(is_unsigned, __is_unsigned(T))
METALSIM_TRAIT(is_pointer, __is_pointer(T))
METALSIM_TRAIT(is_reference, __is_reference(T))
METALSIM_TRAIT(is_array, __is_array(T))
METALSIM_TRAIT(is_const, __is_const(T))
METALSIM_TRAIT(is_enum, __is_enum(T))
METALSIM_TRAIT(is_class, __is_class(T))
METALSIM_TRAIT(is_trivially_copyable, __is_trivially_copyable(T))

template <class... B>
struct conjunction : bool_constant<(bool(B::value) && ...)> {};
template <class... B>
struct disjunction : bool_constant<(bool(B::value) || ...)> {};
template <class B>
struct negation : bool_constant<!bool(B::value)> {};
template <class... B>
using _conjunction = conjunction<B...>;
template <class... B>
using _disjunction = disjunction<B...>;
template <class... B>
constexpr bool conjunction_v = conjunction<B...>::value;
template <class... B>
constexpr bool disjunction_v = disjunction<B...>::value;

template <class T>
T &&declval() noexcept;
template <class T, T... I>
struct integer_sequence {
  static constexpr size_t size() { return sizeof...(I); }
};
template <size_t... I>
using index_sequence = integer_sequence<size_t, I...>;
template <size_t N>
using make_index_sequence = __make_integer_seq<integer_sequence, size_t, N>;

}  // namespace metal
