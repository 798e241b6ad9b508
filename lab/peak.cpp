// The most that this processor's cores reach: independent multiply-adds on registers, fp32 and bf16 (c++ -O2 -march=native).
#include <chrono>
#include <thread>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
typedef float Floats __attribute__((vector_size(4 * kLanes)));
constexpr int kChains = 24;
volatile float sink;

void run(bool bf16, long rounds) {
  Floats sum[kChains], x = Floats{} + 1.0f, y = x;
  for (int i = 0; i < kChains; i++) sum[i] = Floats{} + float(i);  // different, or the compiler keeps one for all
  for (long r = 0; r < rounds; r++) {
    asm volatile("" : "+x"(x), "+x"(y));
#pragma GCC unroll 24
    for (int i = 0; i < kChains; i++) {
#if defined(__AVX512BF16__)
      if (bf16) {
        sum[i] = (Floats)_mm512_dpbf16_ps((__m512)sum[i], (__m512bh)x, (__m512bh)y);
        continue;
      }
#endif
      sum[i] = sum[i] * x + y;
    }
  }
  float total = 0;
  for (Floats s : sum) total += s[0];
  sink = total + bf16;
}

}  // namespace

// GF/s of `threads` threads together.
extern "C" double peak(int bf16, int threads) {
  constexpr long kRounds = 2000000;
  auto start = std::chrono::steady_clock::now();
  std::vector<std::thread> others;
  for (int t = 1; t < threads; t++) others.emplace_back(run, bf16 != 0, kRounds);
  run(bf16 != 0, kRounds);
  for (auto& other : others) other.join();
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
#if defined(__AVX512BF16__)
  const int depth = bf16 ? 2 : 1;
#else
  const int depth = 1;
#endif
  return 1e-9 * threads * kRounds * kChains * kLanes * 2 * depth / seconds;
}
