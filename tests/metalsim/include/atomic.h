// <metal_atomic>
#pragma once
#include "simd.h"

namespace metal {

enum memory_order {
  memory_order_relaxed,
  memory_order_acquire,
  memory_order_release,
  memory_order_acq_rel,
  memory_order_seq_cst
};
enum thread_scope {
  thread_scope_thread,
  thread_scope_simdgroup,
  thread_scope_threadgroup,
  thread_scope_device
};

// Threads of one threadgroup take turns on one core here, so that a fence has nothing to do within it.
METALSIM_FUNCTION void atomic_thread_fence(mem_flags, memory_order, thread_scope = thread_scope_device) {
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

template <class T>
struct _atomic {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8 || sizeof(T) == 1, "no such atomic type");
  using value_type = T;
  T value;
  _atomic() = default;
  _atomic(const _atomic &) = delete;
  _atomic &operator=(const _atomic &) = delete;
};
template <class T>
using atomic = _atomic<T>;
typedef _atomic<int> atomic_int;
typedef _atomic<uint> atomic_uint;
typedef _atomic<ulong> atomic_ulong;
typedef _atomic<float> atomic_float;
typedef _atomic<bool> atomic_bool;

}  // namespace metal

namespace metalsim {

METALSIM_FUNCTION void note_atomic(const volatile void *address, uint bytes, int kind) {
#ifdef SIM_CHECKED
  sim_atomic((const void *)address, bytes, kind);
#endif
}

// Replaces the value by f(value, operand); returns what it was.
template <class T, class F>
METALSIM_FUNCTION T update(volatile metal::_atomic<T> *object, T operand, F f) {
  note_atomic(object, sizeof(T), SIM_READ_WRITE);
  T *address = (T *)&object->value, old, replacement;
  __atomic_load(address, &old, __ATOMIC_SEQ_CST);
  do {
    replacement = f(old, operand);
  } while (!__atomic_compare_exchange(address, &old, &replacement, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
  return old;
}

struct second {
  template <class T>
  METALSIM_FUNCTION T operator()(T, T b) const {
    return b;
  }
};
struct difference {
  template <class T>
  METALSIM_FUNCTION T operator()(T a, T b) const {
    return T(a - b);
  }
};

}  // namespace metalsim

namespace metal {

template <class T>
METALSIM_FUNCTION T atomic_load_explicit(const volatile _atomic<T> *object, memory_order) {
  ::metalsim::note_atomic(object, sizeof(T), SIM_READ);
  T value;
  __atomic_load((T *)&object->value, &value, __ATOMIC_SEQ_CST);
  return value;
}
template <class T>
METALSIM_FUNCTION void atomic_store_explicit(volatile _atomic<T> *object, type_identity_t<T> desired, memory_order) {
  ::metalsim::note_atomic(object, sizeof(T), SIM_WRITE);
  __atomic_store((T *)&object->value, &desired, __ATOMIC_SEQ_CST);
}
template <class T>
METALSIM_FUNCTION bool atomic_compare_exchange_weak_explicit(volatile _atomic<T> *object, T *expected,
                                                             type_identity_t<T> desired, memory_order, memory_order) {
  ::metalsim::note_atomic(object, sizeof(T), SIM_READ_WRITE);
  T old = *expected;
  const bool equal = __atomic_compare_exchange((T *)&object->value, &old, &desired, false, __ATOMIC_SEQ_CST,
                                               __ATOMIC_SEQ_CST);
  *expected = old;
  return equal;
}

#define METALSIM_ATOMIC(name, f)                                                                                     \
  template <class T>                                                                                                 \
  METALSIM_FUNCTION T atomic_##name##_explicit(volatile _atomic<T> *object, type_identity_t<T> operand,              \
                                               memory_order) {                                                       \
    return ::metalsim::update(object, operand, ::metalsim::f());                                                     \
  }
METALSIM_ATOMIC(exchange, second)
METALSIM_ATOMIC(fetch_add, sum)
METALSIM_ATOMIC(fetch_sub, difference)
METALSIM_ATOMIC(fetch_min, least)
METALSIM_ATOMIC(fetch_max, greatest)
METALSIM_ATOMIC(fetch_and, bitwise_and)
METALSIM_ATOMIC(fetch_or, bitwise_or)
METALSIM_ATOMIC(fetch_xor, bitwise_xor)
METALSIM_ATOMIC(min, least)
METALSIM_ATOMIC(max, greatest)
#undef METALSIM_ATOMIC

}  // namespace metal
