// The device's memory: each buffer between pages that nobody may touch.

#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "state.h"

namespace cudasim {

constexpr u64 kPage = 4096, kAlignment = 64, kGuard = 1 << 20;

struct Allocation {
  u64 mapped, pages_end;  // between the guards
  u64 begin, bytes;
  char name[64];
};
static std::map<u64, Allocation> allocations;  // by `begin`

static u64 round_up(u64 x, u64 to) { return (x + to - 1) / to * to; }

// Nothing may touch the memory before it has waited for the kernel before.
void close_gate() {
  cluster.gate_closed = true;
  for (auto &[begin, a] : allocations) mprotect((void *)a.mapped, a.pages_end - a.mapped, PROT_NONE);
}

void open_gate() {
  cluster.gate_closed = false;
  for (auto &[begin, a] : allocations) mprotect((void *)a.mapped, a.pages_end - a.mapped, PROT_READ | PROT_WRITE);
}

bool describe_access(u64 address, char *text, size_t bytes) {
  for (auto &[begin, a] : allocations) {
    if (address < a.mapped - kGuard || address >= a.pages_end + kGuard) continue;
    if (cluster.gate_closed && address >= a.begin && address < a.begin + a.bytes)
      snprintf(text, bytes, "buffer '%s' is touched before the kernel before has ended", a.name);
    else
      snprintf(text, bytes, "access at byte %ld of buffer '%s' of %llu bytes", long(address - a.begin), a.name,
               a.bytes);
    return true;
  }
  return false;
}

// What lies between a buffer and its guards.
void check_fillings() {
  const auto check = [](const Allocation &a, u64 from, u64 to) {
    for (u64 i = from; i < to; i++)
      if (*(unsigned char *)i != kPoison) {
        memset((void *)from, kPoison, to - from);  // it is told once
        fail("out of bounds", {}, "byte %ld of buffer '%s' of %llu bytes was written", long(i - a.begin), a.name,
             a.bytes);
      }
  };
  for (auto &[begin, a] : allocations) {
    check(a, std::max(a.mapped, a.begin - kAlignment), a.begin);
    check(a, a.begin + a.bytes, a.pages_end);
  }
}

}  // namespace cudasim

using namespace cudasim;

extern "C" {

void *cudasim_allocate(u64 bytes, const char *name) {
  const u64 size = round_up(bytes, kAlignment), pages = round_up(std::max<u64>(size, 1), kPage);
  constexpr int kFlags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  char *memory = (char *)mmap(nullptr, pages + 2 * kGuard, PROT_NONE, kFlags, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  mprotect(memory + kGuard, pages, PROT_READ | PROT_WRITE);
  memset(memory + kGuard, kPoison, pages);
  Allocation a = {(u64)memory + kGuard, (u64)memory + kGuard + pages, 0, bytes, {}};
  a.begin = a.pages_end - size;
  snprintf(a.name, sizeof a.name, "%s", name);
  allocations.emplace(a.begin, a);
  return (void *)a.begin;
}

void cudasim_free(void *pointer) {
  const auto found = allocations.find((u64)pointer);
  if (found == allocations.end()) return;
  const Allocation &a = found->second;
  munmap((char *)a.mapped - kGuard, a.pages_end - a.mapped + 2 * kGuard);
  allocations.erase(found);
}

}  // extern "C"
