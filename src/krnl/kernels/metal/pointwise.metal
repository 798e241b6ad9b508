// Element-wise ops and copies of rows. Each thread has four adjacent elements; rows are the grid's second axis.
#include "rows.h"

constant bool has_residual [[function_constant(1)]];

// ---- Conversions between element types, rounded to the nearest, ties to even ----
// They work on bits from memory to memory. Arithmetic on floats may flush subnormal ones, and fast math lets the
// compiler assume that infinities and NaNs do not occur.

METAL_FUNC uint float_from_half(ushort bits) {
  const uint sign = uint(bits & 0x8000) << 16, magnitude = bits & 0x7FFF;
  if (magnitude >= 0x7C00) return sign | 0x7F800000u | magnitude << 13;  // infinite or NaN
  if (magnitude >= 0x0400) return sign | (magnitude + (112u << 10)) << 13;
  if (magnitude == 0) return sign;
  const uint shift = clz(magnitude) - 21;  // subnormal: brings its first bit to where the implied one is
  return sign | (113 - shift) << 23 | (magnitude << shift & 0x03FF) << 13;
}

METAL_FUNC ushort half_from_float(uint bits) {
  const uint sign = bits >> 16 & 0x8000, magnitude = bits & 0x7FFFFFFF;
  uint rounded = 0;
  if (magnitude > 0x7F800000u) rounded = 0x7E00 | (magnitude >> 13 & 0x01FF);  // NaN, made quiet
  else if (magnitude >= 0x477FF000u) rounded = 0x7C00;                         // from 65520 on: infinite
  else if (magnitude >= 0x38800000u)                                           // from 2^-14 on: normal
    rounded = (magnitude + 0x0FFF + (magnitude >> 13 & 1)) / 0x2000 - (112u << 10);
  else if (magnitude > 0x33000000u) {  // above 2^-25, which is halfway to the least
    const uint shift = 126 - (magnitude >> 23), significand = (magnitude & 0x007FFFFF) | 0x00800000;
    rounded = (significand + (1u << (shift - 1)) - 1 + (significand >> shift & 1)) >> shift;
  }
  return ushort(sign | rounded);
}

METAL_FUNC ushort bfloat_from_float(uint bits) {
  if ((bits & 0x7FFFFFFF) > 0x7F800000u) return ushort(bits >> 16 | 0x0040);  // NaN, made quiet
  return ushort((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

METAL_FUNC uint4 load_bits(device const float *row, uint j, uint width) {
  return read4((device const uint *)row, j, width);
}
METAL_FUNC uint4 load_bits(device const half *row, uint j, uint width) {
  const ushort4 x = read4((device const ushort *)row, j, width);
  return uint4(float_from_half(x.x), float_from_half(x.y), float_from_half(x.z), float_from_half(x.w));
}
METAL_FUNC uint4 load_bits(device const ushort *row, uint j, uint width) {
  return uint4(read4(row, j, width)) << 16u;
}

METAL_FUNC void store_bits(device float *row, uint j, uint width, uint4 x) {
  write4((device uint *)row, j, width, x);
}
METAL_FUNC void store_bits(device half *row, uint j, uint width, uint4 x) {
  write4((device ushort *)row, j, width, ushort4(half_from_float(x.x), half_from_float(x.y), half_from_float(x.z),
                                                 half_from_float(x.w)));
}
METAL_FUNC void store_bits(device ushort *row, uint j, uint width, uint4 x) {
  write4(row, j, width, ushort4(bfloat_from_float(x.x), bfloat_from_float(x.y), bfloat_from_float(x.z),
                                bfloat_from_float(x.w)));
}

template <typename From, typename To>
kernel void cast(device const From *x [[buffer(0)]], device To *y [[buffer(1)]], constant uint &count [[buffer(2)]],
                 uint at [[thread_position_in_grid]]) {
  store_bits(y, 4 * at, count, load_bits(x, 4 * at, count));
}

#define CAST(name, From, To) \
  template [[host_name(name)]] kernel void cast<From, To>(device const From *, device To *, constant uint &, uint);
CAST("cast_f32_f32", float, float)
CAST("cast_f32_f16", float, half)
CAST("cast_f32_bf16", float, ushort)
CAST("cast_f16_f32", half, float)
CAST("cast_f16_f16", half, half)
CAST("cast_f16_bf16", half, ushort)
CAST("cast_bf16_f32", ushort, float)
CAST("cast_bf16_f16", ushort, half)
CAST("cast_bf16_bf16", ushort, ushort)

kernel void zero(device float *x [[buffer(0)]], constant uint &count [[buffer(1)]],
                 uint at [[thread_position_in_grid]]) {
  write4(x, 4 * at, count, float4(0.0f));
}

// ---- Rows ----

// Row index[i] of x into row i of y, converted; zeros where index[i] is negative.
template <typename T, typename From>
kernel void gather_rows(device const From *x [[buffer(0)]], device const int *index [[buffer(1)]],
                        device const int *live [[buffer(2)]], device T *y [[buffer(3)]],
                        constant uint &width [[buffer(4)]], uint2 at [[thread_position_in_grid]]) {
  const uint row = at.y, j = 4 * at.x;
  if (row >= uint(*live)) return;
  const int from = index[row];
  const uint4 values = from < 0 ? uint4(0u) : load_bits(x + ulong(from) * width, j, width);
  store_bits(y + ulong(row) * width, j, width, values);
}

#define GATHER_ROWS(name, T, From)                                \
  template [[host_name(name)]] kernel void gather_rows<T, From>( \
      device const From *, device const int *, device const int *, device T *, constant uint &, uint2);
GATHER_ROWS("gather_rows_f16_f16", half, half)
GATHER_ROWS("gather_rows_f16_bf16", half, ushort)
GATHER_ROWS("gather_rows_f16_f32", half, float)
GATHER_ROWS("gather_rows_f32_f16", float, half)
GATHER_ROWS("gather_rows_f32_bf16", float, ushort)
GATHER_ROWS("gather_rows_f32_f32", float, float)

// Row i of x into row index[i] of y.
template <typename T>
kernel void scatter_rows(device const T *x [[buffer(0)]], device const int *index [[buffer(1)]],
                         device const int *live [[buffer(2)]], device T *y [[buffer(3)]],
                         constant uint &width [[buffer(4)]], uint2 at [[thread_position_in_grid]]) {
  const uint row = at.y, j = 4 * at.x;
  if (row >= uint(*live)) return;
  write4(y + ulong(index[row]) * width, j, width, read4(x + ulong(row) * width, j, width));
}

template [[host_name("scatter_rows_f16")]] kernel void scatter_rows<half>(
    device const half *, device const int *, device const int *, device half *, constant uint &, uint2);
template [[host_name("scatter_rows_f32")]] kernel void scatter_rows<float>(
    device const float *, device const int *, device const int *, device float *, constant uint &, uint2);

// ---- Activation ----

// silu(gate) ∘ up.
template <typename T>
kernel void swiglu(device const T *gate [[buffer(0)]], device const T *up [[buffer(1)]],
                   device const int *live [[buffer(2)]], device T *act [[buffer(3)]],
                   constant uint &width [[buffer(4)]], uint2 at [[thread_position_in_grid]]) {
  const uint j = 4 * at.x;
  if (at.y >= uint(*live)) return;
  const ulong row = ulong(at.y) * width;
  const float4 g = load4(gate + row, j, width);
  float4 rest;
  store4(act + row, j, width, g * sigmoid(g, rest) * load4(up + row, j, width));
}

template [[host_name("swiglu_f16")]] kernel void swiglu<half>(
    device const half *, device const half *, device const int *, device half *, constant uint &, uint2);
template [[host_name("swiglu_f32")]] kernel void swiglu<float>(
    device const float *, device const float *, device const int *, device float *, constant uint &, uint2);

// Its gradients, and its value once more.
template <typename T>
kernel void swiglu_backward(device const T *dact [[buffer(0)]], device const T *gate [[buffer(1)]],
                            device const T *up [[buffer(2)]], device const int *live [[buffer(3)]],
                            device T *dgate [[buffer(4)]], device T *dup [[buffer(5)]], device T *act [[buffer(6)]],
                            constant uint &width [[buffer(7)]], uint2 at [[thread_position_in_grid]]) {
  const uint j = 4 * at.x;
  if (at.y >= uint(*live)) return;
  const ulong row = ulong(at.y) * width;
  const float4 da = load4(dact + row, j, width), g = load4(gate + row, j, width), u = load4(up + row, j, width);
  float4 rest;
  const float4 s = sigmoid(g, rest), silu = g * s;
  store4(dgate + row, j, width, da * u * (s + silu * rest));
  store4(dup + row, j, width, da * silu);
  store4(act + row, j, width, silu * u);
}

template [[host_name("swiglu_backward_f16")]] kernel void swiglu_backward<half>(
    device const half *, device const half *, device const half *, device const int *, device half *, device half *,
    device half *, constant uint &, uint2);
template [[host_name("swiglu_backward_f32")]] kernel void swiglu_backward<float>(
    device const float *, device const float *, device const float *, device const int *, device float *,
    device float *, device float *, constant uint &, uint2);

// ---- Rotary positions ----

struct Table {
  uint pairs;
  float scale;
};

// cos and sin of position · inv_freq. The product is formed in 64-bit fixed point, in units of 2^-64 of a turn, whose
// overflow drops whole turns: a position of a million costs no accuracy, and there is no double here to reduce it with.
kernel void rope_table(device const int *position [[buffer(0)]], device const float *inv_freq [[buffer(1)]],
                       device const int *live [[buffer(2)]], device float *cosines [[buffer(3)]],
                       device float *sines [[buffer(4)]], constant Table &table [[buffer(5)]],
                       uint2 at [[thread_position_in_grid]]) {
  const uint row = at.y, j = at.x;
  if (row >= uint(*live) || j >= table.pairs) return;
  // |inv_freq| = significand · 2^-shift; 2^64 / 2π = 0x28BE60DB9391054A.
  const uint bits = as_type<uint>(inv_freq[j]), exponent = bits >> 23 & 0xFF;
  const ulong significand = exponent == 0 ? 0 : (bits & 0x007FFFFF) | 0x00800000;
  const int shift = 150 - int(exponent);
  const ulong product = significand * 0x28BE60DBul + (significand * 0x9391054Aul >> 32);  // · 2^32
  const ulong step = shift <= 32 ? product << (32 - shift) : shift < 96 ? product >> (shift - 32) : 0ul;
  const ulong turns = ulong(long(position[row])) * step;
  const float angle = float(int(turns >> 32)) * 1.46291807926716e-9f;  // 2π / 2^32
  const ulong to = ulong(row) * table.pairs + j;
  cosines[to] = table.scale * precise::cos(angle);
  sines[to] = (bits >> 31 ? -table.scale : table.scale) * precise::sin(angle);
}

struct Heads {
  uint heads, pairs;
  float sign;
};

// Rotates the pairs (x[j], x[j + pairs]) of each head by sign · angle.
template <typename T>
kernel void rope(device const T *x [[buffer(0)]], device const float *cosines [[buffer(1)]],
                 device const float *sines [[buffer(2)]], device const int *live [[buffer(3)]],
                 device T *y [[buffer(4)]], constant Heads &shape [[buffer(5)]],
                 uint2 at [[thread_position_in_grid]]) {
  const uint row = at.y, pairs = shape.pairs, fours = (pairs + 3) / 4;
  const uint head = at.x / fours, j = at.x % fours * 4;
  if (row >= uint(*live) || head >= shape.heads) return;
  const ulong first = (ulong(row) * shape.heads + head) * 2 * pairs, second = first + pairs;
  const float4 a = load4(x + first, j, pairs), b = load4(x + second, j, pairs);
  const float4 c = load4(cosines + ulong(row) * pairs, j, pairs);
  const float4 s = shape.sign * load4(sines + ulong(row) * pairs, j, pairs);
  store4(y + first, j, pairs, a * c - b * s);
  store4(y + second, j, pairs, b * c + a * s);
}

template [[host_name("rope_f16")]] kernel void rope<half>(
    device const half *, device const float *, device const float *, device const int *, device half *,
    constant Heads &, uint2);
template [[host_name("rope_f32")]] kernel void rope<float>(
    device const float *, device const float *, device const float *, device const int *, device float *,
    constant Heads &, uint2);

// ---- Dropout ----

// Philox4x32-10 (Salmon et al. 2011): four random words for a counter.
METAL_FUNC uint4 philox(uint4 counter, uint2 key) {
  for (uint round = 0; round < 10; round++) {
    const uint high0 = mulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
    const uint high1 = mulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
    counter = uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
    key += uint2(0x9E3779B9u, 0xBB67AE85u);
  }
  return counter;
}

struct Dropout {
  uint width, stream, threshold;
  float scale;  // 1 / (1 - rate)
};

// y = residual + x · scale where kept, the residual (or 0) elsewhere. An element is kept when the random word of its
// column, position, document and stream reaches the threshold.
template <typename T>
kernel void dropout(device const T *x [[buffer(0)]], device const int *document [[buffer(1)]],
                    device const int *position [[buffer(2)]], device const uint *key [[buffer(3)]],
                    device const T *residual [[buffer(4), function_constant(has_residual)]],
                    device const int *live [[buffer(5)]], device T *y [[buffer(6)]],
                    constant Dropout &shape [[buffer(7)]], uint2 at [[thread_position_in_grid]]) {
  const uint j = 4 * at.x, width = shape.width;
  if (at.y >= uint(*live)) return;
  const ulong row = ulong(at.y) * width;
  const uint4 counter = uint4(at.x, uint(position[at.y]), uint(document[at.y]), shape.stream);
  const uint4 words = philox(counter, uint2(key[0], key[1]));
  float4 result = select(float4(0.0f), load4(x + row, j, width) * shape.scale, words >= shape.threshold);
  if (has_residual) result += load4(residual + row, j, width);
  store4(y + row, j, width, result);
}

template [[host_name("dropout_f16")]] kernel void dropout<half>(
    device const half *, device const int *, device const int *, device const uint *, device const half *,
    device const int *, device half *, constant Dropout &, uint2);
template [[host_name("dropout_f32")]] kernel void dropout<float>(
    device const float *, device const int *, device const int *, device const uint *, device const float *,
    device const int *, device float *, constant Dropout &, uint2);
