// Element-wise ops and copies of rows. Each thread has eight adjacent elements. Rows are the grid's second axis; where
// it is shorter than there are rows, blocks go on with others.
#include "rows.h"

// ---- Conversions ----

template <typename From, typename To, bool kVectorised>
__global__ void __launch_bounds__(kPointwiseThreads) cast(const From *x, To *y, const uint32 count, int32 beside) {
  const uint64 j = first_element();
  const PreviousLaunch previous(beside);
  if (j >= count) return;
  store<kVectorised>(y, uint32(j), count, load<kVectorised>(x, uint32(j), count));
}

template <bool kVectorised>
__global__ void __launch_bounds__(kPointwiseThreads) zero(f32 *x, const uint32 count, int32 beside) {
  const uint64 j = first_element();
  const PreviousLaunch previous(beside);
  if (j >= count) return;
  store<kVectorised>(x, uint32(j), count, Vector{});
}

// ---- Rows ----

// Row index[i] of x into row i of y, converted; zeros where index[i] is negative.
template <typename T, typename From, bool kVectorised>
__global__ void __launch_bounds__(kPointwiseThreads)
    gather_rows(const From *x, const int32 *index, const int32 *live, T *y, const uint32 width, int32 beside) {
  const uint32 j = uint32(first_element());
  const PreviousLaunch previous(beside);
  const uint32 rows = *live;
  for (uint32 row = blockIdx.y; row < rows; row += gridDim.y) {
    const int32 from = index[row];
    Vector values = {};
    if (from >= 0) values = load<kVectorised>(x + uint64(from) * width, j, width);
    store<kVectorised>(y + uint64(row) * width, j, width, values);
  }
}

// Row i of x into row index[i] of y.
template <typename T, bool kVectorised>
__global__ void __launch_bounds__(kPointwiseThreads)
    scatter_rows(const T *x, const int32 *index, const int32 *live, T *y, const uint32 width, int32 beside) {
  const uint32 j = uint32(first_element());
  const PreviousLaunch previous(beside);
  const uint32 rows = *live;
  for (uint32 row = blockIdx.y; row < rows; row += gridDim.y)
    store<kVectorised>(y + uint64(index[row]) * width, j, width,
                       load<kVectorised>(x + uint64(row) * width, j, width));
}

// ---- Activation ----

// silu(gate) ∘ up.
template <typename T, bool kVectorised>
__global__ void __launch_bounds__(kPointwiseThreads)
    swiglu(const T *gate, const T *up, const int32 *live, T *act, const uint32 width, int32 beside) {
  const uint32 j = uint32(first_element());
  const PreviousLaunch previous(beside);
  const uint32 rows = *live;
  for (uint32 row = blockIdx.y; row < rows; row += gridDim.y) {
    const uint64 start = uint64(row) * width;
    const Vector g = load<kVectorised>(gate + start, j, width), u = load<kVectorised>(up + start, j, width);
    Vector result;
#pragma unroll
    for (int i = 0; i < kVector; i++) {
      float rest;
      result.of[i] = g.of[i] * sigmoid(g.of[i], rest) * u.of[i];
    }
    store<kVectorised>(act + start, j, width, result);
  }
}

// Its gradients, and its value once more.
template <typename T, bool kVectorised>
__global__ void __launch_bounds__(kPointwiseThreads)
    swiglu_backward(const T *dact, const T *gate, const T *up, const int32 *live, T *dgate, T *dup, T *act,
                    const uint32 width, int32 beside) {
  const uint32 j = uint32(first_element());
  const PreviousLaunch previous(beside);
  const uint32 rows = *live;
  for (uint32 row = blockIdx.y; row < rows; row += gridDim.y) {
    const uint64 start = uint64(row) * width;
    Vector da = load<kVectorised>(dact + start, j, width), g = load<kVectorised>(gate + start, j, width),
           u = load<kVectorised>(up + start, j, width);
#pragma unroll
    for (int i = 0; i < kVector; i++) {
      float rest;
      const float s = sigmoid(g.of[i], rest), silu = g.of[i] * s;
      g.of[i] = da.of[i] * u.of[i] * (s + silu * rest);
      u.of[i] *= silu;
      da.of[i] *= silu;
    }
    store<kVectorised>(dgate + start, j, width, g);
    store<kVectorised>(dup + start, j, width, da);
    store<kVectorised>(act + start, j, width, u);
  }
}

// ---- Rotary positions ----

struct Table {
  uint32 pairs;
  float scale;
};

// cos and sin of position · inv_freq. The product is formed in 64-bit fixed point, in units of 2^-64 of a turn, whose
// overflow drops whole turns: a position of a million costs no accuracy, and consumers' GPUs are slow at double.
__global__ void __launch_bounds__(kPointwiseThreads)
    rope_table(const int32 *position, const f32 *inv_freq, const int32 *live, f32 *cosines, f32 *sines,
               const Table table, int32 beside) {
  const uint32 j = blockIdx.x * blockDim.x + threadIdx.x;
  const PreviousLaunch previous(beside);
  if (j >= table.pairs) return;
  // |inv_freq| = significand · 2^-shift; 2^64 / 2π = 0x28BE60DB9391054A.
  const uint32 bits = __float_as_uint(inv_freq[j]), exponent = bits >> 23 & 0xFF, rows = *live;
  const uint64 significand = exponent == 0 ? 0 : (bits & 0x007FFFFF) | 0x00800000;
  const int shift = 150 - int(exponent);
  const uint64 product = significand * 0x28BE60DBull + (significand * 0x9391054Aull >> 32);  // · 2^32
  const uint64 step = shift <= 32 ? product << (32 - shift) : shift < 96 ? product >> (shift - 32) : 0ull;
  for (uint32 row = blockIdx.y; row < rows; row += gridDim.y) {
    const uint64 turns = uint64(position[row]) * step;
    const float half_turns = float(int32(turns >> 32)) * 0x1p-31f;  // from -1 to 1
    float sine, cosine;
    sincospif(half_turns, &sine, &cosine);
    const uint64 to = uint64(row) * table.pairs + j;
    cosines[to] = table.scale * cosine;
    sines[to] = (bits >> 31 ? -table.scale : table.scale) * sine;
  }
}

struct Heads {
  uint32 heads, pairs;
  float sign;
};

// Rotates the pairs (x[j], x[j + pairs]) of each head by sign · angle.
template <typename T, bool kVectorised>
__global__ void __launch_bounds__(kPointwiseThreads)
    rope(const T *x, const f32 *cosines, const f32 *sines, const int32 *live, T *y, const Heads shape, int32 beside) {
  const uint32 pairs = shape.pairs, vectors = pieces(pairs, uint32(kVector)),
               item = blockIdx.x * blockDim.x + threadIdx.x;
  const uint32 head = item / vectors, j = item % vectors * kVector;
  const PreviousLaunch previous(beside);
  if (head >= shape.heads) return;
  const uint32 rows = *live;
  for (uint32 row = blockIdx.y; row < rows; row += gridDim.y) {
    const uint64 first = (uint64(row) * shape.heads + head) * 2 * pairs, second = first + pairs,
                 angle = uint64(row) * pairs;
    const Vector a = load<kVectorised>(x + first, j, pairs), b = load<kVectorised>(x + second, j, pairs);
    const Vector c = load<kVectorised>(cosines + angle, j, pairs), s = load<kVectorised>(sines + angle, j, pairs);
    Vector at_first, at_second;
#pragma unroll
    for (int i = 0; i < kVector; i++) {
      const float sine = shape.sign * s.of[i];
      at_first.of[i] = a.of[i] * c.of[i] - b.of[i] * sine;
      at_second.of[i] = b.of[i] * c.of[i] + a.of[i] * sine;
    }
    store<kVectorised>(y + first, j, pairs, at_first);
    store<kVectorised>(y + second, j, pairs, at_second);
  }
}

// ---- Dropout ----

// Philox4x32-10 (Salmon et al. 2011): four random words for a counter.
__device__ inline uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    const uint32 high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
    const uint32 high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
    counter = {high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0};
    key = {key.x + 0x9E3779B9u, key.y + 0xBB67AE85u};
  }
  return counter;
}

struct Dropout {
  uint32 width, stream, threshold;
  float scale;  // 1 / (1 - rate)
};

// y = residual + x · scale where kept, the residual (or 0) elsewhere. An element is kept when the random word of its
// column, position, document and stream reaches the threshold. A counter is that of four columns.
template <typename T, bool kVectorised, bool kResidual>
__global__ void __launch_bounds__(kPointwiseThreads)
    dropout(const T *x, const int32 *document, const int32 *position, const uint32 *key, const T *residual,
            const int32 *live, T *y, const Dropout shape, int32 beside) {
  const uint32 j = uint32(first_element()), width = shape.width;
  const PreviousLaunch previous(beside);
  const uint32 rows = *live;
  const uint2 keys = {key[0], key[1]};
  for (uint32 row = blockIdx.y; row < rows; row += gridDim.y) {
    const uint64 start = uint64(row) * width;
    const uint32 place = position[row], from = document[row];
    Vector result = {};
    if constexpr (kResidual) result = load<kVectorised>(residual + start, j, width);
    const Vector values = load<kVectorised>(x + start, j, width);
    const uint4 low = philox({j / 4, place, from, shape.stream}, keys),
                high = philox({j / 4 + 1, place, from, shape.stream}, keys);
    const uint32 words[kVector] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < kVector; i++) result.of[i] += words[i] >= shape.threshold ? values.of[i] * shape.scale : 0.0f;
    store<kVectorised>(y + start, j, width, result);
  }
}
