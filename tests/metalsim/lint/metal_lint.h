// What Metal's library looks like to the lint: declarations with address spaces as part of their types.
//
// It declares the part of Metal that our kernels may use. A name missing here is an error of the lint, to be added
// only when the Metal Shading Language Specification has it. Vectors are clang's own, which convert to one another as
// little as Metal's. METAL_LINT_EXPERIMENT allows what only the experiments may do.
#pragma once

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
typedef __SIZE_TYPE__ size_t;
typedef _Float16 half;
typedef __bf16 bfloat;

#define thread
#define device __attribute__((address_space(1)))
#define constant const __attribute__((address_space(2)))
#define threadgroup __attribute__((address_space(3)))
#define kernel
#define METAL_FUNC inline

// Put into every struct. The last one stands for initialisation by a list of members.
#define METAL_LINT_COPIES(name)               \
  name() = default;                           \
  name(const name&) = default;                \
  name(const device name&);                   \
  name(const threadgroup name&);              \
  name(constant name&);                       \
  name& operator=(const name&) = default;     \
  template <class A, class B, class... More>  \
  name(A, B, More...);

namespace metal {

template <class T, int n>
using vec = T __attribute__((ext_vector_type(n)));

// ---- What the lint writes in place of vector constructors and casts -------------------------------------------------

template <class T>
struct Vector {
  static constexpr int size = 1;
};
template <class T, int n>
struct Vector<T __attribute__((ext_vector_type(n)))> {
  static constexpr int size = n;
};

// float4(a, b), half4(x), …: one scalar, or as many elements as the vector has.
template <class V, class... Parts>
constexpr V make_vector(Parts...) {
  constexpr int given = (Vector<Parts>::size + ... + 0);
  static_assert(given == 0 || given == Vector<V>::size || (given == 1 && sizeof...(Parts) == 1),
                "a vector is made of one scalar or of exactly its elements");
  return V();
}

template <class T>
struct Space {
  static constexpr int number = -1;  // no pointer
};
template <class T>
struct Space<T*> {
  static constexpr int number = 0;
};
template <class T>
struct Space<device T*> {
  static constexpr int number = 1;
};
template <class T>
struct Space<__attribute__((address_space(2))) T*> {
  static constexpr int number = 2;
};
template <class T>
struct Space<threadgroup T*> {
  static constexpr int number = 3;
};

// (device half4*)p
template <class To, class From>
To cast_pointer(From from) {
  static_assert(Space<From>::number >= 0, "a number is cast to a pointer");
  static_assert(Space<To>::number == Space<From>::number, "a cast changes the address space");
  return (To)from;
}

// ---- Types ----------------------------------------------------------------------------------------------------------

template <class To, class From>
To as_type(From) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  return To();
}

template <class T>
bool is_function_constant_defined(const T&);

// ---- Arithmetic -----------------------------------------------------------------------------------------------------

#define UNARY(name)          \
  float name(float);         \
  half name(half);           \
  template <class T, int n>  \
  vec<T, n> name(vec<T, n>);
#define BINARY(name)         \
  float name(float, float);  \
  half name(half, half);     \
  template <class T, int n>  \
  vec<T, n> name(vec<T, n>, vec<T, n>);
#define MATHEMATICS                                                                                                \
  UNARY(acos) UNARY(asin) UNARY(atan) UNARY(ceil) UNARY(cos) UNARY(cosh) UNARY(exp) UNARY(exp2) UNARY(exp10)       \
  UNARY(fabs) UNARY(floor) UNARY(fract) UNARY(log) UNARY(log2) UNARY(log10) UNARY(rint) UNARY(round) UNARY(rsqrt)  \
  UNARY(sin) UNARY(sinh) UNARY(sqrt) UNARY(tan) UNARY(tanh) UNARY(trunc) UNARY(saturate) UNARY(sign)               \
  BINARY(atan2) BINARY(copysign) BINARY(divide) BINARY(fmax) BINARY(fmin) BINARY(fmod) BINARY(pow) BINARY(powr)
MATHEMATICS
namespace precise {
MATHEMATICS
}
namespace fast {
MATHEMATICS
}

float fma(float, float, float);
half fma(half, half, half);
template <class T, int n>
vec<T, n> fma(vec<T, n>, vec<T, n>, vec<T, n>);
float ldexp(float, int);
template <class T>
T abs(T);
template <class T>
T max(T, T);
template <class T>
T min(T, T);
template <class T>
T clamp(T, T, T);
template <class T>
T mix(T, T, T);
template <class T>
T select(T, T, bool);
template <class T, class B, int n>
vec<T, n> select(vec<T, n>, vec<T, n>, vec<B, n>);
template <class T, int n>
T dot(vec<T, n>, vec<T, n>);
template <class T, int n>
bool any(vec<T, n>);
template <class T, int n>
bool all(vec<T, n>);
template <class T>
T popcount(T);
template <class T>
T clz(T);
template <class T>
T ctz(T);
template <class T>
T mulhi(T, T);
template <class T>
T rotate(T, T);

// ---- Threads together -----------------------------------------------------------------------------------------------

enum class mem_flags { mem_none = 0, mem_device = 1, mem_threadgroup = 2 };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
void threadgroup_barrier(mem_flags);
void simdgroup_barrier(mem_flags);

#define LANES(name)   \
  template <class T>  \
  T name(T);
LANES(simd_sum) LANES(simd_product) LANES(simd_max) LANES(simd_min) LANES(simd_and) LANES(simd_or) LANES(simd_xor)
LANES(simd_prefix_inclusive_sum) LANES(simd_prefix_exclusive_sum) LANES(simd_broadcast_first)
#define LANES_AND_INDEX(name)  \
  template <class T>           \
  T name(T, ushort);
LANES_AND_INDEX(simd_broadcast) LANES_AND_INDEX(simd_shuffle) LANES_AND_INDEX(simd_shuffle_up)
LANES_AND_INDEX(simd_shuffle_down) LANES_AND_INDEX(simd_shuffle_xor)
bool simd_all(bool);
bool simd_any(bool);
bool simd_is_first();

// ---- Matrices of a simdgroup ----------------------------------------------------------------------------------------

template <class T, int columns, int rows = columns>
struct simdgroup_matrix {
  static_assert(columns == 8 && rows == 8, "matrices are 8x8");
  simdgroup_matrix();
  explicit simdgroup_matrix(T diagonal);
  vec<T, 2>& thread_elements();
  const vec<T, 2>& thread_elements() const;
};
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;

template <class T, int columns = 8, int rows = columns>
simdgroup_matrix<T, columns, rows> make_filled_simdgroup_matrix(T);

using ulong2 = vec<ulong, 2>;
#define MATRIX_IN(space)                                                                                 \
  template <class T, int c, int r>                                                                       \
  void simdgroup_load(simdgroup_matrix<T, c, r>&, const space T*, ulong = c, ulong2 = 0, bool = false);  \
  template <class T, int c, int r>                                                                       \
  void simdgroup_store(const simdgroup_matrix<T, c, r>&, space T*, ulong = c, ulong2 = 0, bool = false);
MATRIX_IN(device)
MATRIX_IN(threadgroup)

namespace lint {
#ifdef METAL_LINT_EXPERIMENT
template <class T>
constexpr bool accumulates = true;
#else
template <class T>
constexpr bool accumulates = __is_same(T, float);
#endif
}  // namespace lint

template <class D, class A, class B, class C>
void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&,
                                   const simdgroup_matrix<B, 8, 8>&, const simdgroup_matrix<C, 8, 8>&) {
  static_assert(lint::accumulates<C> && lint::accumulates<D>, "accumulators are float");
}
template <class D, class A, class B>
void simdgroup_multiply(simdgroup_matrix<D, 8, 8>&, const simdgroup_matrix<A, 8, 8>&,
                        const simdgroup_matrix<B, 8, 8>&) {
  static_assert(lint::accumulates<D>, "accumulators are float");
}

}  // namespace metal

#define VECTORS(type)                   \
  using type##2 = metal::vec<type, 2>;  \
  using type##3 = metal::vec<type, 3>;  \
  using type##4 = metal::vec<type, 4>;
VECTORS(bool)
VECTORS(char)
VECTORS(uchar)
VECTORS(short)
VECTORS(ushort)
VECTORS(int)
VECTORS(uint)
VECTORS(long)
VECTORS(half)
VECTORS(float)
VECTORS(bfloat)
using ulong2 = metal::ulong2;
using ulong3 = metal::vec<ulong, 3>;
using ulong4 = metal::vec<ulong, 4>;
