// A Worker runs one threadgroup at a time on one OS thread. Each thread of the threadgroup is a Fiber: a stack and the
// place where it stopped. Fibers run until they meet a collective, a barrier or the kernel's end.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>

#include "fiber.h"
#include "host.h"
#include "shadow.h"

namespace sim {

constexpr int MAX_THREADS = 1024;
constexpr int MAX_SIMDGROUPS = MAX_THREADS / SIM_LANES;
constexpr int MAX_WORKERS = 16;
constexpr int MAX_ARRAYS = 64;                    // threadgroup variables and arguments of one kernel
constexpr uint32_t THREADGROUP_LIMIT = 32 * 1024; // bytes
constexpr uint32_t ARENA_BYTES = 128 * 1024;      // more: what is over the limit is reported, and redzones
constexpr uint32_t REDZONE = 64;                  // bytes between arrays in checked builds
constexpr int MAX_MATRICES = 512;

struct Simdgroup;

// What lanes wait for together. They are let go when all lanes of the simdgroup wait at one site for one thing.
enum class Wait : uint32_t { nothing, gather, barrier, multiply, flush };

struct Fiber {
  SimThread thread;             // first: what sim_thread() returns
  void *stack_pointer;
  uintptr_t stack;              // its lowest address
  Simdgroup *simdgroup;
  int slot;                     // its bit in the simdgroup's masks
  Wait wait;
  uint32_t detail;              // bytes of a gather, flags of a barrier
  uint32_t arrival;             // when it began to wait, in the simdgroup's count
  const void *site;             // where it waits: the return address
};

struct Simdgroup {
  uint32_t runnable, waiting, alive;    // bits of slots; one that is alive and neither waits at a threadgroup barrier
  bool mixed;                           // those that wait do not all wait for the same thing
  Fiber *first;                         // the one that has waited longest
  uint32_t arrivals;
  int index;
  uint32_t active;                      // lanes of the last gather
  Epochs epochs;                        // simdgroup barriers passed
  Fiber *fibers[SIM_LANES];             // by slot: the order in which lanes run
  alignas(64) char given[SIM_LANES][SIM_GATHER_BYTES];
  alignas(64) char gathered[SIM_LANES * SIM_GATHER_BYTES];
  alignas(64) float a[64], b[64], c[64];   // of the product that lanes wait for; c becomes the result
  alignas(64) SimQueue queue;
};

struct ThreadgroupArray {
  const void *key;
  uint32_t offset, bytes;
  const char *name;
};

struct Worker {
  Fiber *current;               // null between threadgroups
  Launch *launch;
  bool checked;
  bool shared;                  // other workers run the same launch
  bool abandoned;               // the launch cannot go on
  bool armed;                   // faults are ours to report
  bool reporting;               // the reports' lock is held
  void *main_stack;
  sigjmp_buf escape;            // out of a launch that cannot go on
  char signal_stack[32768];     // a fault may be a full stack's
  // The threadgroup that runs.
  SimThreadgroup threadgroup;
  uint32_t threadgroup_index;   // linear
  uint32_t threadgroup_count;   // of the launch
  uint32_t stamp;               // of this threadgroup in shadow cells; unique in the process
  uint32_t first_stamp;         // of this launch: the stamp of the threadgroup that runs first
  uintptr_t image;              // where the kernel library's code begins
  uint32_t runnable_simdgroups; // bits
  int threads, alive, at_barrier, simdgroup_count;
  const void *barrier_site;
  bool barrier_mixed;
  Epochs epochs;                // threadgroup barriers passed
  uint32_t random;
  // Its memory.
  char *arena;
  uint32_t arena_used, memory_used;
  int array_count;
  ThreadgroupArray arrays[MAX_ARRAYS];
  Cell *arena_cells;
  uint8_t *arena_written;       // per byte
  char *stacks;
  uintptr_t harmless_page;      // last address that was found to lie in the kernel's own image
  // Results.
  long counters[COUNTERS];
  int accumulator_count, matrix_count;
  const void *accumulators[MAX_MATRICES], *matrices[MAX_MATRICES];

  Simdgroup simdgroups[MAX_SIMDGROUPS];
  Fiber fibers[MAX_THREADS];
};

extern __thread Worker *worker __attribute__((tls_model("initial-exec")));

// All workers lie side by side, so that one comparison tells a worker's memory from device memory.
struct WorkerMemory {
  uintptr_t base;
  size_t stride, stack_stride, stacks_offset, page;
};
extern WorkerMemory worker_memory;
Worker *acquire_worker();       // null: all are taken
void release_worker(Worker *);

// launch.cpp
void begin_threadgroup_memory(Worker &);

// pool.cpp
struct Grid {
  uint32_t count;               // threadgroups
  uint32_t threadgroups[3];
  uint32_t first_stamp;         // of the threadgroup that runs first
};
void run_workers(Launch &, const Grid &);
// The linear index of the threadgroup that runs as number `ordinal` of a launch of `count`.
uint32_t threadgroup_at(const Launch &, uint32_t count, uint32_t ordinal);

// scheduler.cpp
void run_threadgroup(Worker &, uint32_t index);
[[noreturn]] void abandon_launch(Worker &);
void wait_for_simdgroup(Wait wait, uint32_t detail, const void *site);

// access.cpp: a launch that was stopped may have left some shut.
void open_cell_locks();

// matrix.cpp
void finish_multiply(Worker &, Simdgroup &);
void finish_flush(Worker &, Simdgroup &);

// reports.cpp
void begin_reports(Launch *);
// Of the running thread, if any; `code` is the address after the instruction. Does not return when there are too many.
__attribute__((format(printf, 3, 4))) void report(ReportKind kind, const void *code, const char *format, ...);
// Of the running thread and another access or wait that it collides with.
struct Other {
  const void *code;
  uint32_t thread, threadgroup;   // or NOBODY
};
__attribute__((format(printf, 4, 5))) void report_both(ReportKind kind, const void *code, Other other,
                                                       const char *format, ...);
// Of a thread that waits, about what it waits for.
__attribute__((format(printf, 3, 4))) void report_wait(ReportKind kind, const Fiber &fiber, const char *format, ...);
// At a place known as file and line.
__attribute__((format(printf, 4, 5))) void report_at(ReportKind kind, const char *file, unsigned line,
                                                     const char *format, ...);

// faults.cpp: while a launch runs, faults of its fibers become reports.
void catch_faults();
void stop_catching_faults();
constexpr int TIME_IS_UP = SIGVTALRM;   // sent to a worker's OS thread

}  // namespace sim
