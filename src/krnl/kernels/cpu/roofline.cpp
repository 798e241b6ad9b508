// What this processor can do at most with the instruction set this file is compiled for, measured: the roof that
// `krnl profile` compares kernels with.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <vector>

#include "pack.h"
#include "parallel.h"

#define KRNL_EXPORT extern "C" __attribute__((visibility("default")))

namespace krnl {
namespace {

using Clock = std::chrono::steady_clock;

// Independent sums, enough to hide the latency of an addition, few enough to stay in registers.
constexpr int kRows = W == 16 ? 4 : 3, kColumns = W == 16 ? 5 : 3;
constexpr int64_t kRounds = 2000000;  // some milliseconds
// The best try counts: whatever disturbs one only makes it slower. New threads may share a core for the first few.
constexpr int kTries = 10;

double seconds_since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// Makes the compiler believe that a value changes, so that rounds cannot be merged.
inline void keep(Floats& v) {
#if defined(__AVX512F__)
  asm volatile("" : "+v"(v));
#elif defined(__x86_64__)
  asm volatile("" : "+x"(v));
#else
  asm volatile("" : "+w"(v));
#endif
}

template <class Cell>
float multiply_add_many(float seed) {
  Floats sums[kRows][kColumns] = {};
  Floats a[kRows], b[kColumns];
  for (int i = 0; i < kRows; i++) a[i] = broadcast(seed + static_cast<float>(i));
  for (int j = 0; j < kColumns; j++) b[j] = broadcast(seed - static_cast<float>(j));
  for (int64_t round = 0; round < kRounds; round++) {
    KRNL_UNROLL
    for (int i = 0; i < kRows; i++)
      KRNL_UNROLL
      for (int j = 0; j < kColumns; j++) sums[i][j] = Cell::multiply_add(sums[i][j], a[i], b[j]);
    KRNL_UNROLL
    for (int i = 0; i < kRows; i++) keep(a[i]);
  }
  Floats total = {};
  for (int i = 0; i < kRows; i++)
    for (int j = 0; j < kColumns; j++) total += sums[i][j];
  return sum(total);
}

template <class Cell>
double peak_flops() {
  std::vector<float> sink(thread_count());
  double best = 0;
  for (int attempt = 0; attempt < kTries; attempt++) {
    const auto start = Clock::now();
    parallel_for(thread_count(), [&](int64_t i, int) { sink[i] = multiply_add_many<Cell>(static_cast<float>(attempt)); });
    const double operations = 2.0 * Cell::depth * W * kRows * kColumns * kRounds * thread_count();
    best = std::max(best, operations / seconds_since(start));
  }
  volatile float kept = sink[0];
  (void)kept;
  return best;
}

double peak_bytes() {
  constexpr int64_t kFloats = 64 << 20;  // 256 MiB: beyond every cache
  constexpr int64_t kPieces = 256;
  float* memory = static_cast<float*>(std::aligned_alloc(4096, kFloats * sizeof(float)));
  if (memory == nullptr) return 0;
  std::vector<float> sink(kPieces);
  double best = 0;
  parallel_for(kPieces, [&](int64_t i, int) { std::fill_n(memory + i * (kFloats / kPieces), kFloats / kPieces, 1.0f); });
  for (int attempt = 0; attempt < kTries; attempt++) {
    const auto start = Clock::now();
    parallel_for(kPieces, [&](int64_t i, int) {
      const float* p = memory + i * (kFloats / kPieces);
      Floats total[4] = {};
      for (int64_t j = 0; j < kFloats / kPieces; j += 4 * W)
        for (int k = 0; k < 4; k++) total[k] += load(p + j + k * W);
      sink[i] = sum(total[0] + total[1] + total[2] + total[3]);
    });
    best = std::max(best, kFloats * sizeof(float) / seconds_since(start));
  }
  std::free(memory);
  return best;
}

}  // namespace
}  // namespace krnl

// Operations a second with all threads on cells of float32, and of bf16 where they have dot products of their own.
KRNL_EXPORT double krnl_peak_flops_f32() { return krnl::peak_flops<krnl::CellOf<float>>(); }
KRNL_EXPORT double krnl_peak_flops_bf16() { return krnl::peak_flops<krnl::CellOf<krnl::bf16>>(); }

// Bytes a second that all threads read from memory.
KRNL_EXPORT double krnl_peak_bytes() { return krnl::peak_bytes(); }
