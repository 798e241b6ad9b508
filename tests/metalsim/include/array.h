// array<T, N>, uniform<T> and os_log.
#pragma once
#include "vector.h"

namespace metal {

template <class T, size_t N>
struct array {
  using value_type = T;
  T elements[N];

  METALSIM_FUNCTION constexpr size_t size() const { return N; }
  METALSIM_FUNCTION constexpr bool empty() const { return N == 0; }
  METALSIM_FUNCTION constexpr T &operator[](size_t i) { return elements[i]; }
  METALSIM_FUNCTION constexpr const T &operator[](size_t i) const { return elements[i]; }
  METALSIM_FUNCTION constexpr T &front() { return elements[0]; }
  METALSIM_FUNCTION constexpr T &back() { return elements[N - 1]; }
  METALSIM_FUNCTION constexpr T *data() { return elements; }
  METALSIM_FUNCTION constexpr const T *data() const { return elements; }
  METALSIM_FUNCTION constexpr T *begin() { return elements; }
  METALSIM_FUNCTION constexpr T *end() { return elements + N; }
  METALSIM_FUNCTION constexpr const T *begin() const { return elements; }
  METALSIM_FUNCTION constexpr const T *end() const { return elements + N; }
};

// A value that is the same in all threads. It is not checked that it is.
template <class T>
struct uniform {
  T value;
  uniform() = default;
  METALSIM_FUNCTION constexpr uniform(T v) : value(v) {}
  METALSIM_FUNCTION constexpr operator T() const { return value; }
};
template <class T>
METALSIM_FUNCTION constexpr uniform<T> make_uniform(T value) {
  return uniform<T>(value);
}

struct os_log {
  METALSIM_FUNCTION constexpr os_log(const char * = "", const char * = "") {}
#define METALSIM_LOG(name)                                        \
  template <class... A>                                           \
  METALSIM_FUNCTION void name(const char *, A...) const {}
  METALSIM_LOG(log)
  METALSIM_LOG(log_debug)
  METALSIM_LOG(log_info)
  METALSIM_LOG(log_error)
  METALSIM_LOG(log_fault)
#undef METALSIM_LOG
};
constexpr os_log os_log_default;

}  // namespace metal
