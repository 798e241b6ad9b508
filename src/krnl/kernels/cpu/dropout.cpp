// Dropout with masks that are drawn again wherever they are needed: Philox4x32-10 (Salmon et al. 2011) of the element's
// column, position, document and stream.
#include <cmath>

#include "rows.h"

namespace krnl {
namespace {

// Philox multiplies 32-bit words to 64 bits: one word in the low half of each lane, anything in the high half.
constexpr int kLanes = W / 2;
typedef uint64_t Longs __attribute__((vector_size(8 * kLanes)));
constexpr uint64_t kLow = 0xffffffff;

inline Longs product(Longs a, uint32_t b) {
#if defined(__AVX512F__)
  return (Longs)_mm512_maskz_mul_epu32(0xff, (__m512i)a, _mm512_set1_epi64(b));  // masked as in simd.h
#elif defined(__AVX2__)
  return (Longs)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#elif defined(__SSE2__)
  return (Longs)_mm_mul_epu32((__m128i)a, _mm_set1_epi64x(b));
#else
  return (a & kLow) * b;
#endif
}

struct Key {
  uint32_t word[2];
};

// a0 b0 a1 b1 ..., each lane two random words.
template <size_t... lane>
inline void store_alternating(uint32_t* to, Longs a, Longs b, std::index_sequence<lane...>) {
  const Longs first = __builtin_shufflevector(a, b, (lane % 2 * kLanes + lane / 2)...);
  const Longs second = __builtin_shufflevector(a, b, (lane % 2 * kLanes + (kLanes + lane) / 2)...);
  std::memcpy(to, &first, sizeof first);
  std::memcpy(to + 2 * kLanes, &second, sizeof second);
}

// The random words of columns [4 block, 4 block + 4 kLanes) of a token.
inline void philox(int64_t block, uint32_t position, uint32_t document, uint32_t stream, Key key, uint32_t* words) {
  Longs c0 = Longs{} + static_cast<uint64_t>(block), c1 = Longs{} + position, c2 = Longs{} + document, c3 = Longs{} + stream;
  for (int lane = 0; lane < kLanes; lane++) c0[lane] += lane;
  for (int round = 0; round < 10; round++) {
    const Longs a = product(c0, 0xD2511F53u), b = product(c2, 0xCD9E8D57u);
    c0 = (b >> 32) ^ c1 ^ key.word[0];
    c1 = b;
    c2 = (a >> 32) ^ c3 ^ key.word[1];
    c3 = a;
    key = {{key.word[0] + 0x9E3779B9u, key.word[1] + 0xBB67AE85u}};
  }
  store_alternating(words, (c0 & kLow) | (c1 << 32), (c2 & kLow) | (c3 << 32), std::make_index_sequence<kLanes>{});
}

// y = residual + x / (1 - rate) where kept, residual (or 0) elsewhere.
void drop(const Dispatch& d, const Argument& residual, const Argument& y, int64_t rows) {
  const int32_t *document = d[1].as<int32_t>(), *position = d[2].as<int32_t>();
  const Key key = *d[3].as<Key>();
  const double rate = d.attributes[0];
  const uint32_t stream = static_cast<uint32_t>(d.attributes[1]);
  const float scale = static_cast<float>(1 / (1 - rate));
  const Words threshold = Words{} + static_cast<uint32_t>(std::nearbyint(rate * 0x1p32));
  const int64_t width = y.shape[1];
  with_activation(y.type, [&](auto zero) {
    using T = decltype(zero);
    for_rows(rows, width, [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; i++) {
        const T *xi = d[0].as<T>() + i * width, *ri = residual ? residual.as<T>() + i * width : nullptr;
        T* yi = y.as<T>() + i * width;
        alignas(64) uint32_t words[4 * kLanes];
        for_vectors(width, [&](int64_t j, int64_t n) {
          const int64_t within = j % (4 * kLanes);
          if (within == 0) philox(j / 4, position[i], document[i], stream, key, words);
          Words drawn;
          std::memcpy(&drawn, words + within, sizeof drawn);
          Floats v = select((Ints)(drawn >= threshold), load_some(xi + j, n) * scale, Floats{});
          if (ri) v += load_some(ri + j, n);
          store_some(yi + j, v, n);
        });
      }
    });
  });
}

void dropout(const Dispatch& d) { drop(d, Argument{}, d[5], d.live(4)); }
void dropout_backward(const Dispatch& d) { drop(d, d[4], d[6], d.live(5)); }

KRNL_KERNEL("dropout", dropout);
KRNL_KERNEL("dropout_backward", dropout_backward);

}  // namespace
}  // namespace krnl
