// How a kernel gets its arguments, and the table of kernels that the engine reads. The source pass writes these
// macros and registrations (see source.py).
#pragma once
#include "../engine/engine.h"
#include "atomic.h"
#include "simdgroup_matrix.h"

namespace metalsim {

// ---- Bindings: where a parameter's value comes from ----

template <int Index>
struct buffer {
  static constexpr int kind = SIM_ARGUMENT_BUFFER, index = Index;
  METALSIM_FUNCTION static void *address(const SimThread *t) { return t->threadgroup->buffers[Index]; }
};
template <int Index>
struct threadgroup_buffer {
  static constexpr int kind = SIM_ARGUMENT_THREADGROUP, index = Index;
  METALSIM_FUNCTION static void *address(const SimThread *t) { return t->threadgroup->threadgroup_buffers[Index]; }
};
// An argument that exists only where a function constant is true.
template <const bool *Exists, class Binding>
struct only_if : Binding {
  static constexpr const bool *exists = Exists;
};

enum position_name {
#define METALSIM_POSITION(name, value) name,
#include "positions.h"
#undef METALSIM_POSITION
};
template <position_name Name>
struct position {};

METALSIM_FUNCTION uint3 three(const uint (&v)[3]) { return uint3(v[0], v[1], v[2]); }
template <position_name Name>
METALSIM_FUNCTION uint3 value_of(const SimThread *t) {
  const SimThreadgroup *g = t->threadgroup;
#define METALSIM_POSITION(name, value) \
  if constexpr (Name == name) return uint3(value);
#include "positions.h"
#undef METALSIM_POSITION
}

template <class Binding, class Parameter>
struct argument {
  static_assert(__is_pointer(Parameter) || __is_reference(Parameter),
                "a [[buffer]] or [[threadgroup]] parameter is a pointer or a reference");
  using pointed = metal::remove_pointer_t<metal::remove_reference_t<Parameter>>;
  static Parameter get(const SimThread *t) {
    if constexpr (__is_pointer(Parameter)) return (Parameter)Binding::address(t);
    else return *(metal::remove_reference_t<Parameter> *)Binding::address(t);
  }
};
template <position_name Name, class T>
struct argument<position<Name>, T> {
  static T get(const SimThread *t) { return T(value_of<Name>(t).x); }
};
template <position_name Name, class T, int N>
struct argument<position<Name>, vec<T, N>> {
  static vec<T, N> get(const SimThread *t) {
    const uint3 v = value_of<Name>(t);
    if constexpr (N == 2) return vec<T, 2>(T(v.x), T(v.y));
    else return vec<T, 3>(v);
  }
};
template <class Binding, class T>
struct argument<Binding, const T> : argument<Binding, T> {};

// ---- Registration ----

template <class T>
constexpr uint bytes_of = sizeof(T);
template <>
constexpr uint bytes_of<void> = 0;
template <>
constexpr uint bytes_of<const void> = 0;

template <class Binding, class = void>
struct exists_of {
  static constexpr const bool *value = nullptr;
};
template <class Binding>
struct exists_of<Binding, decltype(void(Binding::exists))> {
  static constexpr const bool *value = Binding::exists;
};

template <class Binding, class Parameter>
struct describe {
  using pointed = typename argument<Binding, Parameter>::pointed;
  static void add(SimArgument *&next, const char *name) {
    *next++ = {name,    Binding::kind, Binding::index, bytes_of<pointed>, !metal::is_const_v<pointed>,
               exists_of<Binding>::value};
  }
};
template <position_name Name, class Parameter>
struct describe<position<Name>, Parameter> {
  static void add(SimArgument *&, const char *) {}
};

struct kernel_entry {
  SimKernel kernel;
  kernel_entry *next;
};
struct constant_entry {
  SimConstant constant_;
  constant_entry *next;
};
static kernel_entry *first_kernel, **last_kernel = &first_kernel;
static constant_entry *first_constant, **last_constant = &first_constant;
static int kernel_count, constant_count;

template <auto Function, class Type, class Bindings>
struct kernel_registration;
template <auto Function, class... Parameter, class... Binding>
struct kernel_registration<Function, void (*)(Parameter...), void(Binding...)> : kernel_entry {
  static_assert(sizeof...(Parameter) == sizeof...(Binding));
  SimArgument arguments[sizeof...(Parameter) + 1];

  __attribute__((no_sanitize("thread"))) static void run(SimThread *thread_) {
    Function(argument<Binding, Parameter>::get(thread_)...);
  }
  kernel_registration(const char *name, const char *const *names, int max_threads) {
    SimArgument *end = arguments;
    (describe<Binding, Parameter>::add(end, *names++), ...);
    kernel = {name, run, arguments, int(end - arguments), max_threads};
    next = nullptr;
    *last_kernel = this;
    last_kernel = &this->next;
    kernel_count++;
  }
};

struct constant_registration : constant_entry {
  constant_registration(const char *name, const char *type, int index, uint bytes, void *value, bool *defined) {
    constant_ = {name, type, index, bytes, value, defined};
    next = nullptr;
    *last_constant = this;
    last_constant = &this->next;
    constant_count++;
  }
};

// Constants initialised from function constants, evaluated in order before each launch.
struct derivation {
  void (*evaluate)();
  derivation *next = nullptr;
  static inline derivation *first = nullptr, **last = &first;
  explicit derivation(void (*evaluate_)()) : evaluate(evaluate_) {
    *last = this;
    last = &next;
  }
};
static void derive() {
  for (const derivation *d = derivation::first; d; d = d->next) d->evaluate();
}

template <int Kernels, int Constants>
SimLibrary table() {
  static SimKernel kernels[Kernels + 1];
  static SimConstant constants[Constants + 1];
  int i = 0;
  for (const kernel_entry *k = first_kernel; k; k = k->next) kernels[i++] = k->kernel;
  i = 0;
  for (const constant_entry *c = first_constant; c; c = c->next) constants[i++] = c->constant_;
#ifdef SIM_CHECKED
  const int checked = 1;
#else
  const int checked = 0;
#endif
  return {kernels, Kernels, constants, Constants, derive, checked};
}

}  // namespace metalsim

#define METALSIM_JOIN_(a, b) a##b
#define METALSIM_JOIN(a, b) METALSIM_JOIN_(a, b)
#define METALSIM_UNWRAP(...) __VA_ARGS__

#define METALSIM_KERNEL(host_name, names, bindings, max_threads, ...) \
  METALSIM_REGISTER(METALSIM_JOIN(metalsim_kernel_, __COUNTER__), host_name, names, bindings, max_threads, __VA_ARGS__)
#define METALSIM_REGISTER(id, host_name, names, bindings, max_threads, ...)                            \
  static const char *const METALSIM_JOIN(id, _names)[] = {METALSIM_UNWRAP names};                      \
  static ::metalsim::kernel_registration<__VA_ARGS__, decltype(__VA_ARGS__), void bindings> id(      \
      host_name, METALSIM_JOIN(id, _names), max_threads);

#define METALSIM_FUNCTION_CONSTANT(type, name, index)                                        \
  static type name;                                                                          \
  static bool METALSIM_JOIN(name, _is_defined);                                              \
  static ::metalsim::constant_registration METALSIM_JOIN(name, _registration)(               \
      #name, #type, index, sizeof(type), &name, &METALSIM_JOIN(name, _is_defined));
#define METALSIM_DERIVED_CONSTANT(type, name, ...)                                           \
  static type name;                                                                          \
  static void METALSIM_JOIN(name, _evaluate)() { name = (__VA_ARGS__); }                     \
  static ::metalsim::derivation METALSIM_JOIN(name, _derivation)(METALSIM_JOIN(name, _evaluate));
#define is_function_constant_defined(name) METALSIM_JOIN(name, _is_defined)

// A threadgroup variable is a reference into the memory of the running threadgroup. The static object exists once
// for each instance of the function that declares it.
#define METALSIM_THREADGROUP(type, name, dimensions)                                                     \
  typedef METALSIM_UNWRAP type METALSIM_JOIN(name, _type) dimensions;                                    \
  static const char METALSIM_JOIN(name, _key) = 0;                                                       \
  METALSIM_JOIN(name, _type) &name = *(METALSIM_JOIN(name, _type) *)sim_threadgroup_array(               \
      &METALSIM_JOIN(name, _key), sizeof(METALSIM_JOIN(name, _type)), alignof(METALSIM_JOIN(name, _type)), #name);

// Copies of a union whose members are vectors. Vectors have their own, so the union would have none; it would also
// not be made of one value in braces any more.
#define METALSIM_UNION(name, first)                                                                \
  name() = default;                                                                                \
  name(const name &other) { __builtin_memcpy((void *)this, &other, sizeof(name)); }                \
  name(decltype(first) value) : first(value) {}                                                    \
  name &operator=(const name &other) {                                                             \
    __builtin_memcpy((void *)this, &other, sizeof(name));                                          \
    return *this;                                                                                  \
  }

#ifdef SIM_CHECKED
#define METALSIM_COLLECTIVE __attribute__((always_inline))
#else
#define METALSIM_COLLECTIVE
#endif

#define METALSIM_LIBRARY(kernels, constants)                                       \
  extern "C" __attribute__((visibility("default"))) const SimLibrary sim_library = \
      ::metalsim::table<kernels, constants>();
