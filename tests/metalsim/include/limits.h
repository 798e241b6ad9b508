// <metal_limits>
#pragma once
#include "type_traits.h"

namespace metal {

template <class T>
struct numeric_limits {
  static constexpr bool is_specialized = is_integral_v<T>;
  static constexpr bool is_signed = is_signed_v<T>;
  static constexpr bool is_integer = true;
  static constexpr bool has_infinity = false;
  static constexpr int digits = sizeof(T) * 8 - is_signed_v<T>;
  METALSIM_FUNCTION static constexpr T max() { return T(make_unsigned_t<T>(~0ul) >> is_signed_v<T>); }
  METALSIM_FUNCTION static constexpr T min() { return is_signed_v<T> ? T(-max() - 1) : T(0); }
  METALSIM_FUNCTION static constexpr T lowest() { return min(); }
  METALSIM_FUNCTION static constexpr T infinity() { return T(0); }
};

template <>
struct numeric_limits<bool> {
  static constexpr bool is_specialized = true, is_signed = false, is_integer = true, has_infinity = false;
  static constexpr int digits = 1;
  METALSIM_FUNCTION static constexpr bool max() { return true; }
  METALSIM_FUNCTION static constexpr bool min() { return false; }
  METALSIM_FUNCTION static constexpr bool lowest() { return false; }
};

#define METALSIM_LIMITS(T, digits_, largest, smallest, step, tiny)                                                \
  template <>                                                                                                     \
  struct numeric_limits<T> {                                                                                      \
    static constexpr bool is_specialized = true, is_signed = true, is_integer = false, has_infinity = true;       \
    static constexpr int digits = digits_;                                                                        \
    METALSIM_FUNCTION static constexpr T max() { return T(largest); }                                             \
    METALSIM_FUNCTION static constexpr T min() { return T(smallest); }                                            \
    METALSIM_FUNCTION static constexpr T lowest() { return T(-largest); }                                         \
    METALSIM_FUNCTION static constexpr T epsilon() { return T(step); }                                            \
    METALSIM_FUNCTION static constexpr T denorm_min() { return T(tiny); }                                         \
    METALSIM_FUNCTION static constexpr T infinity() { return T(__builtin_inff()); }                               \
    METALSIM_FUNCTION static constexpr T quiet_NaN() { return T(__builtin_nanf("")); }                            \
    METALSIM_FUNCTION static constexpr T signaling_NaN() { return T(__builtin_nanf("")); }                        \
  };
METALSIM_LIMITS(float, 24, 0x1.fffffep127f, 0x1p-126f, 0x1p-23f, 0x1p-149f)
METALSIM_LIMITS(half, 11, 65504.0f, 0x1p-14f, 0x1p-10f, 0x1p-24f)
METALSIM_LIMITS(bfloat, 8, 0x1.fep127f, 0x1p-126f, 0x1p-7f, 0x1p-133f)
#undef METALSIM_LIMITS

}  // namespace metal
