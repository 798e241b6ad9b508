// <metal_simdgroup_matrix>: 8x8 matrices that the 32 lanes of a simdgroup hold together, two elements each.
// Fast builds queue products and run many at once (engine.h); whoever looks at a matrix of floats settles them first.
#pragma once
#include "simd.h"

namespace metalsim {

#ifdef SIM_CHECKED
constexpr bool queued = false;
#else
constexpr bool queued = true;
#endif

// A product may be waiting to be added to the elements of a matrix of floats: copies and the end of its life wait.
template <class T, bool Queued>
struct matrix_elements {
  vec<T, 2> elements;
  METALSIM_FUNCTION void settle() const {}
};
template <>
struct matrix_elements<float, true> {
  vec<float, 2> elements;
  matrix_elements() = default;
  METALSIM_FUNCTION matrix_elements(const matrix_elements &other) {
    sim_settle();
    elements = other.elements;
  }
  METALSIM_FUNCTION matrix_elements &operator=(const matrix_elements &other) {
    sim_settle();
    elements = other.elements;
    return *this;
  }
  METALSIM_FUNCTION ~matrix_elements() { sim_settle(); }
  METALSIM_FUNCTION void settle() const { sim_settle(); }
};

}  // namespace metalsim

namespace metal {

template <class T, int Cols, int Rows>
struct simdgroup_matrix : private ::metalsim::matrix_elements<T, ::metalsim::queued> {
  static_assert(Cols == 8 && Rows == 8, "a simdgroup_matrix is 8x8");
  static_assert(is_floating_point_v<T>, "a simdgroup_matrix holds half, bfloat or float");
  using storage_type = vec<T, 2>;
  using elements_base = ::metalsim::matrix_elements<T, ::metalsim::queued>;

  simdgroup_matrix() = default;
  METALSIM_FUNCTION explicit simdgroup_matrix(T diagonal) {
    const uint element = sim_thread()->element, row = element / 8, column = element % 8;
    raw() = storage_type(row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0));
    note();
  }

  // This lane's elements: (row, column) and (row, column + 1) of SimThread::element.
  METALSIM_FUNCTION storage_type &thread_elements() {
    this->settle();
    return raw();
  }
  METALSIM_FUNCTION const storage_type &thread_elements() const {
    this->settle();
    return raw();
  }

  METALSIM_FUNCTION storage_type &raw() { return this->elements; }
  METALSIM_FUNCTION const storage_type &raw() const { return this->elements; }
  METALSIM_FUNCTION SimPair pair() const { return SimPair{float(raw().s[0]), float(raw().s[1])}; }
  METALSIM_FUNCTION void note() const {
#ifdef SIM_CHECKED
    sim_note_matrix(this);
#endif
  }
  // Waits if a product that would change this matrix is still queued.
  METALSIM_FUNCTION void settle_if_pending() const {
    if constexpr (::metalsim::queued && is_same_v<T, float>)
      if (sim_is_pending(sim_thread(), &this->elements)) sim_flush();
  }
};

typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;

template <class T, int Cols = 8, int Rows = Cols>
METALSIM_FUNCTION simdgroup_matrix<T, Cols, Rows> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, Cols, Rows> m;
  m.raw() = vec<T, 2>(value);
  m.note();
  return m;
}

}  // namespace metal

namespace metalsim {

// Where this lane's two elements lie in memory. The origin is (column, row) of the matrix in memory as it lies there;
// a transposed access exchanges rows and columns within the 8x8 block.
template <class P>
struct element_pointers {
  P first, second;
  METALSIM_FUNCTION element_pointers(P base, ulong per_row, ulong2 origin, bool transposed) {
    const uint element = sim_thread()->element, row = element / 8, column = element % 8;
    P block = base + origin.y * per_row + origin.x;
    first = transposed ? block + column * per_row + row : block + row * per_row + column;
    second = first + (transposed ? per_row : 1);
  }
};

template <class D, class A, class B, class C>
constexpr int multiply_counter =
    metal::is_same_v<A, half> && metal::is_same_v<B, half> && metal::is_same_v<C, float> && metal::is_same_v<D, float>
        ? SIM_MATRIX_MULTIPLIES
        : SIM_MATRIX_MULTIPLIES_OTHER;

}  // namespace metalsim

namespace metal {

template <class T, class P>
METALSIM_FUNCTION void metalsim_load(simdgroup_matrix<T, 8, 8> &d, P source, ulong per_row, ulong2 origin,
                                     bool transposed) {
  static_assert(is_same_v<remove_cv_t<remove_pointer_t<P>>, T>, "simdgroup_load: memory and matrix differ in type");
  d.settle_if_pending();
  const ::metalsim::element_pointers<P> at(source, per_row, origin, transposed);
  sim_count_matrix(transposed ? SIM_MATRIX_TRANSPOSED_LOADS : SIM_MATRIX_LOADS);
  d.raw().s[0] = *at.first;
  d.raw().s[1] = *at.second;
  d.note();
}
template <class T>
METALSIM_FUNCTION void simdgroup_load(simdgroup_matrix<T, 8, 8> &d, const T *source,
                                      ulong elements_per_row = 8, ulong2 origin = ulong2(0), bool transpose = false) {
  metalsim_load(d, source, elements_per_row, origin, transpose);
}
template <class T>
METALSIM_FUNCTION void simdgroup_load(simdgroup_matrix<T, 8, 8> &d, const volatile T *source,
                                      ulong elements_per_row = 8, ulong2 origin = ulong2(0), bool transpose = false) {
  metalsim_load(d, source, elements_per_row, origin, transpose);
}

template <class T, class P>
METALSIM_FUNCTION void metalsim_store(const simdgroup_matrix<T, 8, 8> &a, P target, ulong per_row, ulong2 origin,
                                      bool transposed) {
  const vec<T, 2> elements = a.thread_elements();
  const ::metalsim::element_pointers<P> at(target, per_row, origin, transposed);
  sim_count_matrix(SIM_MATRIX_STORES);
  *at.first = elements.s[0];
  *at.second = elements.s[1];
}
template <class T>
METALSIM_FUNCTION void simdgroup_store(const simdgroup_matrix<T, 8, 8> &a, T *target,
                                       ulong elements_per_row = 8, ulong2 origin = ulong2(0), bool transpose = false) {
  metalsim_store(a, target, elements_per_row, origin, transpose);
}
template <class T>
METALSIM_FUNCTION void simdgroup_store(const simdgroup_matrix<T, 8, 8> &a, volatile T *target,
                                       ulong elements_per_row = 8, ulong2 origin = ulong2(0), bool transpose = false) {
  metalsim_store(a, target, elements_per_row, origin, transpose);
}

template <class D, class A, class B, class C>
METALSIM_FUNCTION void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8> &d,
                                                     const simdgroup_matrix<A, 8, 8> &a,
                                                     const simdgroup_matrix<B, 8, 8> &b,
                                                     const simdgroup_matrix<C, 8, 8> &c) {
  constexpr int counter = ::metalsim::multiply_counter<D, A, B, C>;
  a.settle_if_pending();
  b.settle_if_pending();
  if constexpr (::metalsim::queued && is_same_v<C, float> && is_same_v<D, float>) {
    if (&d != &c) d = c;
    sim_queue_multiply(a.pair(), b.pair(), (float *)&d.raw(), counter);
  } else {
    c.settle_if_pending();
    const SimPair result = sim_multiply(a.pair(), b.pair(), c.pair(), &d, counter);
    d.settle_if_pending();
    d.raw().s[0] = D(result.x);
    d.raw().s[1] = D(result.y);
  }
}
template <class D, class A, class B>
METALSIM_FUNCTION void simdgroup_multiply(simdgroup_matrix<D, 8, 8> &d,
                                          const simdgroup_matrix<A, 8, 8> &a,
                                          const simdgroup_matrix<B, 8, 8> &b) {
  const simdgroup_matrix<D, 8, 8> zero = make_filled_simdgroup_matrix<D, 8, 8>(D(0));
  simdgroup_multiply_accumulate(d, a, b, zero);
}
template <class T>
METALSIM_FUNCTION simdgroup_matrix<T, 8, 8> operator*(const simdgroup_matrix<T, 8, 8> &a,
                                                      const simdgroup_matrix<T, 8, 8> &b) {
  simdgroup_matrix<T, 8, 8> d;
  simdgroup_multiply(d, a, b);
  return d;
}

}  // namespace metal
