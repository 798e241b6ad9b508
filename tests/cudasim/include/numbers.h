// Elements of 16 bits and floats. Kernels and the engine include it.
#pragma once

namespace cudasim {

inline float as_float(unsigned bits) {
  float x;
  __builtin_memcpy(&x, &bits, 4);
  return x;
}
inline unsigned as_bits(float x) {
  unsigned bits;
  __builtin_memcpy(&bits, &x, 4);
  return bits;
}

inline float from_bf16(unsigned short bits) { return as_float(unsigned(bits) << 16); }

inline float from_f16(unsigned short bits) {
  const unsigned sign = unsigned(bits & 0x8000) << 16, rest = bits & 0x7FFF;
  if (rest >= 0x7C00) return as_float(sign | 0x7F800000 | (rest & 0x3FF) << 13);
  return as_float(as_bits(as_float(rest << 13) * 0x1p112f) | sign);  // subnormals come out right, too
}

// To the nearest, ties to even.
inline unsigned short to_bf16(float x) {
  const unsigned bits = as_bits(x);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return 0x7FFF;
  return (unsigned short)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

inline unsigned short to_f16(float x) {
  const unsigned bits = as_bits(x), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return 0x7FFF;
  if (magnitude >= 0x477FF000) return (unsigned short)(sign | 0x7C00);  // from 65,520 on
  if (magnitude < 0x38800000)  // subnormal: added to 0.5 it is rounded at the right place
    return (unsigned short)(sign | (as_bits(as_float(magnitude) + 0.5f) - 0x3F000000));
  return (unsigned short)(sign | ((magnitude - 0x38000000 + 0xFFF + (magnitude >> 13 & 1)) >> 13));
}

}  // namespace cudasim
