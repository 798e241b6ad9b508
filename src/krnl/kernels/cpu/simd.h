// Vectors of floats in the widest registers of the instruction set this file is compiled for.
//
// The compilers' vector extensions give arithmetic, comparison and fused multiply-add on every target from one source;
// what they cannot say (rounding to bf16 and f16 in hardware), or GCC 12 says badly, stands beside the general way. Such
// intrinsics are the masked ones with every lane on: of the plain ones GCC 12 warns that they read an uninitialised register.
#pragma once
#include <cstdint>
#include <cstring>
#include <utility>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace krnl {

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float Floats __attribute__((vector_size(4 * W)));
typedef int32_t Ints __attribute__((vector_size(4 * W)));
typedef uint32_t Words __attribute__((vector_size(4 * W)));
typedef uint16_t Halves __attribute__((vector_size(2 * W)));

struct bf16 { uint16_t bits; };
struct f16 { uint16_t bits; };

inline Floats broadcast(float x) { return x - Floats{}; }  // a sum would turn -0 into 0
// 0, 1, ... W - 1.
inline Ints lanes() {
  Ints v;
  for (int i = 0; i < W; i++) v[i] = i;
  return v;
}
inline Floats select(Ints mask, Floats yes, Floats no) { return mask ? yes : no; }
// The larger one; b where either is not a number.
inline Floats max(Floats a, Floats b) {
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b); 
#else
  return a > b ? a : b;
#endif
}
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }

inline Floats load(const float* p) { Floats v; std::memcpy(&v, p, sizeof v); return v; }
inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

inline Floats load(const bf16* p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
#if defined(__AVX512F__)
  return (Floats)((Words)_mm512_maskz_cvtepu16_epi32(0xffff, (__m256i)h) << 16);
#else
  return (Floats)(__builtin_convertvector(h, Words) << 16);
#endif
}
inline void store(bf16* p, Floats v) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  std::memcpy(p, &h, sizeof h);
#else
  // Round to nearest, ties to even; a NaN keeps its top bits and stays a NaN.
  Words u = (Words)v, rounded = (u + 0x7fff + ((u >> 16) & 1)) >> 16, quiet = (u >> 16) | 0x40;
  Words nan = (Words)(v != v);
  Halves h = __builtin_convertvector((nan & quiet) | (~nan & rounded), Halves);
  std::memcpy(p, &h, sizeof h);
#endif
}

// Half precision: in hardware where there is any, else by moving bits (no call into a compiler's library).
inline Floats load(const f16* p) {
  Halves h;
  std::memcpy(&h, p, sizeof h);
#if defined(__AVX512F__)
  return (Floats)_mm512_maskz_cvtph_ps(0xffff, (__m256i)h);
#elif defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)h);
#else
  // With the exponent's bias corrected by a product, subnormal values come out normal.
  Words u = __builtin_convertvector(h, Words), magnitude = (u & 0x7fff) << 13;
  Floats scaled = (Floats)magnitude * 0x1p112f;
  Words special = (Words)(magnitude >= (0x7c00u << 13));  // infinite or not a number
  return (Floats)((u & 0x8000) << 16 | (~special & (Words)scaled) | (special & (magnitude | 0x7f800000)));
#endif
}
inline void store(f16* p, Floats v) {
#if defined(__AVX512F__)
  __m256i h = _mm512_maskz_cvtps_ph(0xffff, (__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__F16C__)
  __m128i h = _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  Words u = (Words)v, magnitude = u & 0x7fffffff;
  Words normal = (magnitude - (112u << 23) + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  // Adding 1/2 leaves a subnormal result, rounded, in the low bits.
  Words subnormal = (Words)((Floats)magnitude + 0.5f) - (126u << 23);
  Words small = (Words)(magnitude < (113u << 23)), large = (Words)(magnitude >= (143u << 23));
  Words nan = (Words)(v != v), special = 0x7c00 | (nan & (0x200 | ((magnitude >> 13) & 0x3ff)));
  Words bits = (small & subnormal) | (~small & ((large & special) | (~large & normal)));
  Halves h = __builtin_convertvector(bits | ((u >> 16) & 0x8000), Halves);
#endif
  std::memcpy(p, &h, sizeof h);
}

// The first `count` (0..W) elements; the rest are `fill`, and memory beyond them is not touched.
template <class T>
inline Floats load_some(const T* p, int64_t count, float fill = 0) {
  if (count >= W) return load(p);
  T t[W] = {};
  std::memcpy(t, p, count * sizeof(T));
  return select(lanes() < static_cast<int32_t>(count), load(t), broadcast(fill));
}
template <class T>
inline void store_some(T* p, Floats v, int64_t count) {
  if (count >= W) return store(p, v);
  T t[W];
  store(t, v);
  std::memcpy(p, t, count * sizeof(T));
}

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) { uint32_t u = uint32_t(x.bits) << 16; float f; std::memcpy(&f, &u, 4); return f; }
inline float to_float(f16 x) { return load_some(&x, 1)[0]; }
template <class T>
inline T from_float(float x) {
  T t;
  store_some(&t, broadcast(x), 1);
  return t;
}

// Reductions by halves, in a tree that is the same for every compiler.
template <class Vector, class Combine, size_t... lane>
inline float reduce(Vector v, const Combine& combine, std::index_sequence<lane...>) {
  constexpr size_t half = sizeof...(lane);
  if constexpr (half == 1) {
    return combine(v[0], v[1]);
  } else {
    auto both = combine(__builtin_shufflevector(v, v, lane...), __builtin_shufflevector(v, v, (half + lane)...));
    return reduce(both, combine, std::make_index_sequence<half / 2>{});
  }
}
inline float sum(Floats v) {
  return reduce(v, [](auto a, auto b) { return a + b; }, std::make_index_sequence<W / 2>{});
}
inline float largest(Floats v) {
  return reduce(v, [](auto a, auto b) { return a > b ? a : b; }, std::make_index_sequence<W / 2>{});
}

constexpr float kLog2e = 1.44269504088896341f;

// e^x within 2 ulp for x in [-87.3, 88.7]; 0 below, as far as it matters to a softmax; infinite above; NaN stays NaN.
inline Floats exp(Floats x) {
  const Floats log2e = broadcast(kLog2e), high = broadcast(0.693359375f), low = broadcast(-2.12194440054690583e-4f);
  Floats t = max(min(x, broadcast(88.72f)), broadcast(-87.33f));
  const Floats magic = broadcast(12582912.0f);  // 1.5 * 2^23: adding it rounds to the nearest integer
  Floats shifted = t * log2e + magic, n = shifted - magic;
  Floats r = t - n * high;
  r = r - n * low;
  // Minimax polynomial of (e^r - 1 - r) / r² on [-ln2/2, ln2/2] (Cephes expf).
  Floats p = broadcast(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  // n is in the low bits of `shifted`; adding it to the exponent of p multiplies by 2^n, n = 128 included.
  Floats y = (Floats)((Ints)p + ((Ints)shifted << 23));
  y = select(x < broadcast(-87.33f), Floats{}, y);
  y = select(x > broadcast(88.72f), broadcast(__builtin_inff()), y);
  return select(x != x, x, y);
}

// 2^x within 3 ulp for x in [-126, 127]; 0 below, minus infinity included; NaN stays NaN. For the inner loops of softmax:
// no other x.
inline Floats exp2(Floats x) {
  Floats t = max(broadcast(-127.0f), x);
  const Floats magic = broadcast(12582912.0f + 127.0f);  // as above, with the exponent's bias in the low bits
  Floats shifted = t + magic;
  Floats r = t - (shifted - magic);
  // Minimax polynomial of the relative error on [-1/2, 1/2], its constant term held at 1: 9e-8.
  Floats p = broadcast(1.326472731e-3f);
  p = p * r + 9.671512991e-3f;
  p = p * r + 5.550733581e-2f;
  p = p * r + 2.402224243e-1f;
  p = p * r + 6.931470037e-1f;
  p = p * r + 1.0f;
  return p * (Floats)((Ints)shifted << 23);
}
inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exp(-x)); }

}  // namespace krnl
