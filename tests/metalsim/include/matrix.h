// <metal_matrix>: floatCxR and halfCxR with C columns of R components.
#pragma once
#include "common.h"

namespace metal {

template <class T, int Cols, int Rows = Cols>
struct matrix {
  using value_type = T;
  using column = vec<T, Rows>;
  column columns[Cols];

  matrix() = default;
  METALSIM_FUNCTION explicit matrix(T diagonal) {
    for (int c = 0; c < Cols; c++)
      for (int r = 0; r < Rows; r++) columns[c].s[r] = c == r ? diagonal : T(0);
  }
  template <class... A, enable_if_t<sizeof...(A) == Cols && (::metalsim::is_vector<A> && ...) &&
                                        (is_convertible_v<A, column> && ...), int> = 0>
  METALSIM_FUNCTION matrix(const A &...columns_) : columns{column(columns_)...} {}
  template <class... A, enable_if_t<sizeof...(A) == Cols * Rows && (::metalsim::is_number<A> && ...), int> = 0>
  METALSIM_FUNCTION matrix(A... elements) {
    const T all[] = {T(elements)...};
    for (int c = 0; c < Cols; c++)
      for (int r = 0; r < Rows; r++) columns[c].s[r] = all[c * Rows + r];
  }
  template <class U, enable_if_t<!is_same_v<T, U>, int> = 0>
  METALSIM_FUNCTION explicit matrix(const matrix<U, Cols, Rows> &m) {
    for (int c = 0; c < Cols; c++) columns[c] = column(m.columns[c]);
  }

  METALSIM_FUNCTION column &operator[](size_t c) { return columns[c]; }
  METALSIM_FUNCTION const column &operator[](size_t c) const { return columns[c]; }

  METALSIM_FUNCTION friend matrix operator+(matrix a, const matrix &b) {
    for (int c = 0; c < Cols; c++) a.columns[c] += b.columns[c];
    return a;
  }
  METALSIM_FUNCTION friend matrix operator-(matrix a, const matrix &b) {
    for (int c = 0; c < Cols; c++) a.columns[c] -= b.columns[c];
    return a;
  }
  METALSIM_FUNCTION friend matrix operator-(matrix a) {
    for (int c = 0; c < Cols; c++) a.columns[c] = -a.columns[c];
    return a;
  }
  METALSIM_FUNCTION friend matrix operator*(matrix a, T b) {
    for (int c = 0; c < Cols; c++) a.columns[c] *= column(b);
    return a;
  }
  METALSIM_FUNCTION friend matrix operator*(T a, const matrix &b) { return b * a; }
  METALSIM_FUNCTION friend column operator*(const matrix &a, vec<T, Cols> b) {
    column sum = a.columns[0] * column(b.s[0]);
    for (int c = 1; c < Cols; c++) sum += a.columns[c] * column(b.s[c]);
    return sum;
  }
  METALSIM_FUNCTION friend vec<T, Cols> operator*(column a, const matrix &b) {
    vec<T, Cols> result;
    for (int c = 0; c < Cols; c++) result.s[c] = dot(a, b.columns[c]);
    return result;
  }
  METALSIM_FUNCTION matrix &operator+=(const matrix &b) { return *this = *this + b; }
  METALSIM_FUNCTION matrix &operator-=(const matrix &b) { return *this = *this - b; }
  METALSIM_FUNCTION matrix &operator*=(T b) { return *this = *this * b; }
  METALSIM_FUNCTION matrix &operator*=(const matrix<T, Cols, Cols> &b) { return *this = *this * b; }
  METALSIM_FUNCTION friend bool operator==(const matrix &a, const matrix &b) {
    bool equal = true;
    for (int c = 0; c < Cols; c++) equal &= all(a.columns[c] == b.columns[c]);
    return equal;
  }
  METALSIM_FUNCTION friend bool operator!=(const matrix &a, const matrix &b) { return !(a == b); }
};

template <class T, int Inner, int Rows, int Cols>
METALSIM_FUNCTION matrix<T, Cols, Rows> operator*(const matrix<T, Inner, Rows> &a, const matrix<T, Cols, Inner> &b) {
  matrix<T, Cols, Rows> result;
  for (int c = 0; c < Cols; c++) result.columns[c] = a * b.columns[c];
  return result;
}

template <class T, int Cols, int Rows>
METALSIM_FUNCTION matrix<T, Rows, Cols> transpose(const matrix<T, Cols, Rows> &m) {
  matrix<T, Rows, Cols> result;
  for (int c = 0; c < Cols; c++)
    for (int r = 0; r < Rows; r++) result.columns[r].s[c] = m.columns[c].s[r];
  return result;
}

template <class T, int N>
METALSIM_FUNCTION T determinant(const matrix<T, N, N> &m) {
  if constexpr (N == 2) return T(m[0][0] * m[1][1] - m[1][0] * m[0][1]);
  else if constexpr (N == 3) return dot(m[0], cross(m[1], m[2]));
  else {  // by the minors of the first column's elements
    T sum = T(0);
    for (int r = 0; r < 4; r++) {
      matrix<T, 3, 3> minor;
      for (int c = 1; c < 4; c++)
        for (int i = 0; i < 3; i++) minor[c - 1][i] = m[c][i + (i >= r)];
      sum = T(sum + (r % 2 ? -m[0][r] : m[0][r]) * determinant(minor));
    }
    return sum;
  }
}

}  // namespace metal

#define METALSIM_MATRICES(T, C)                      \
  using T##C##x2 = ::metal::matrix<T, C, 2>;         \
  using T##C##x3 = ::metal::matrix<T, C, 3>;         \
  using T##C##x4 = ::metal::matrix<T, C, 4>;         \
  namespace metal {                                  \
  using ::T##C##x2;                                  \
  using ::T##C##x3;                                  \
  using ::T##C##x4;                                  \
  }
METALSIM_MATRICES(half, 2)
METALSIM_MATRICES(half, 3)
METALSIM_MATRICES(half, 4)
METALSIM_MATRICES(float, 2)
METALSIM_MATRICES(float, 3)
METALSIM_MATRICES(float, 4)
#undef METALSIM_MATRICES
