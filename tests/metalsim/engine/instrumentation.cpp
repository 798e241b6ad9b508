// The functions that clang's instrumentation of a checked build calls, and the header's own notes of accesses.

#include <stdlib.h>
#include <string.h>

#include "access.h"

using namespace sim;

static inline void check(const void *address, uint32_t bytes, bool writes, bool atomic, const void *code) {
  Worker *w = worker;
  if (!w || !w->current) return;   // constants that are initialised when the library is loaded
  if ((uintptr_t)address - w->current->stack < worker_memory.stack_stride) return;   // the thread's own
  if (bytes) check_access(*w, {(uintptr_t)address, bytes, writes, atomic, code});
}

static inline void check_alignment(const void *address, uintptr_t alignment, const char *verb, const void *code) {
  if ((uintptr_t)address % alignment)
    report(MISALIGNED, code, "%s of %d bytes at an address that is no multiple of %d", verb,
           (int)alignment, (int)alignment);
}

#define CODE __builtin_return_address(0)

// clang calls the aligned functions from an alignment of 8 on, whatever the size.
#define SIM_ACCESSES(bytes)                                                                   \
  void __tsan_read##bytes(void *p) {                                                          \
    check_alignment(p, bytes < 8 ? bytes : 8, "read", CODE);                                  \
    check(p, bytes, false, false, CODE);                                                      \
  }                                                                                           \
  void __tsan_write##bytes(void *p) {                                                         \
    check_alignment(p, bytes < 8 ? bytes : 8, "write", CODE);                                 \
    check(p, bytes, true, false, CODE);                                                       \
  }                                                                                           \
  void __tsan_unaligned_read##bytes(void *p) { check(p, bytes, false, false, CODE); }         \
  void __tsan_unaligned_write##bytes(void *p) { check(p, bytes, true, false, CODE); }         \
  void __tsan_read_write##bytes(void *p) {                                                    \
    check_alignment(p, bytes < 8 ? bytes : 8, "read", CODE);                                  \
    check(p, bytes, false, false, CODE);                                                      \
    check(p, bytes, true, false, CODE);                                                       \
  }                                                                                           \
  void __tsan_unaligned_read_write##bytes(void *p) {                                          \
    check(p, bytes, false, false, CODE);                                                      \
    check(p, bytes, true, false, CODE);                                                       \
  }

// The compiler's own names, called by kernel libraries.
#pragma GCC visibility push(default)
extern "C" {

SIM_ACCESSES(1)
SIM_ACCESSES(2)
SIM_ACCESSES(4)
SIM_ACCESSES(8)
SIM_ACCESSES(16)

void __tsan_read_range(void *p, size_t bytes) { check(p, (uint32_t)bytes, false, false, CODE); }
void __tsan_write_range(void *p, size_t bytes) { check(p, (uint32_t)bytes, true, false, CODE); }

void *__tsan_memcpy(void *to, const void *from, size_t bytes) {
  check(from, (uint32_t)bytes, false, false, CODE);
  check(to, (uint32_t)bytes, true, false, CODE);
  return memcpy(to, from, bytes);
}
void *__tsan_memmove(void *to, const void *from, size_t bytes) {
  check(from, (uint32_t)bytes, false, false, CODE);
  check(to, (uint32_t)bytes, true, false, CODE);
  return memmove(to, from, bytes);
}
void *__tsan_memset(void *to, int value, size_t bytes) {
  check(to, (uint32_t)bytes, true, false, CODE);
  return memset(to, value, bytes);
}

void __tsan_init(void) {}
void __tsan_func_entry(void *) {}
void __tsan_func_exit(void) {}

void sim_access(const void *p, unsigned bytes, int kind) {
  if (kind != SIM_WRITE) check(p, bytes, false, false, CODE);
  if (kind != SIM_READ) check(p, bytes, true, false, CODE);
}

void sim_atomic(const void *p, unsigned bytes, int kind) {
  if (worker && worker->current) worker->counters[ATOMIC_OPERATIONS]++;
  if (kind != SIM_WRITE) check(p, bytes, false, true, CODE);
  if (kind != SIM_READ) check(p, bytes, true, true, CODE);
}

// ---- UndefinedBehaviorSanitizer: array bounds and alignment, in the form that goes on ------------------------

struct SourceLocation {
  const char *path;
  uint32_t line, column;
};
struct OutOfBounds {
  SourceLocation location;
  const void *array_type, *index_type;
};
struct TypeMismatch {
  SourceLocation location;
  const void *type;
  unsigned char log_alignment, kind;
};

void __ubsan_handle_out_of_bounds(OutOfBounds *data, uintptr_t index) {
  if (worker && worker->current)
    report_at(ARRAY_INDEX, data->location.path, data->location.line, "index %ld is outside the array", (long)index);
}

void __ubsan_handle_type_mismatch_v1(TypeMismatch *data, uintptr_t address) {
  const unsigned alignment = 1u << data->log_alignment;
  if (worker && worker->current && address % alignment)
    report_at(MISALIGNED, data->location.path, data->location.line, "access at an address that is no multiple of %u",
              alignment);
}
}
#pragma GCC visibility pop
