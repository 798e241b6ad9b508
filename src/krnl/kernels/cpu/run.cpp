// The library's doors: find a kernel by name, run a list of dispatches, time them one by one.
#include <chrono>
#include <cstring>
#include <map>
#include <string>

#include "kernel.h"
#include "parallel.h"

namespace krnl {
namespace {

std::map<std::string, Kernel>& registry() {
  static std::map<std::string, Kernel> kernels;
  return kernels;
}

}  // namespace

Registration::Registration(const char* name, Kernel kernel) { registry()[name] = kernel; }

}  // namespace krnl

#define KRNL_EXPORT extern "C" __attribute__((visibility("default")))

// The kernel's address, or null.
KRNL_EXPORT void* krnl_find(const char* name) {
  auto found = krnl::registry().find(name);
  return found == krnl::registry().end() ? nullptr : reinterpret_cast<void*>(found->second);
}

// Makes the pool `count` threads wide; returns how many it got.
KRNL_EXPORT int krnl_threads(int count) {
  krnl::set_thread_count(count);
  return krnl::thread_count();
}

// To be called in the child of a fork, which has none of the parent's threads: the pool starts anew.
KRNL_EXPORT void krnl_forget_threads() { krnl::forget_threads(); }

KRNL_EXPORT void krnl_run(const krnl::Dispatch* dispatches, int64_t count) {
  for (int64_t i = 0; i < count; i++) dispatches[i].kernel(dispatches[i]);
}

// The same, with the seconds that each dispatch took.
KRNL_EXPORT void krnl_time(const krnl::Dispatch* dispatches, int64_t count, double* seconds) {
  using Clock = std::chrono::steady_clock;
  for (int64_t i = 0; i < count; i++) {
    auto start = Clock::now();
    dispatches[i].kernel(dispatches[i]);
    seconds[i] = std::chrono::duration<double>(Clock::now() - start).count();
  }
}

// The most capable instruction set of this processor that the libraries are built for.
KRNL_EXPORT const char* krnl_best_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
              __builtin_cpu_supports("avx512dq");
  if (wide && __builtin_cpu_supports("avx512bf16")) return "avx512bf16";
  if (wide) return "avx512";
  // Every processor with AVX2 and FMA has F16C too.
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
  return "plain";
}
