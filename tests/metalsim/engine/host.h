// What tests/metalsim/device.py calls, through ctypes. Layouts here and there must agree.
#pragma once

#include <stdint.h>

#include "engine.h"

enum ReportKind {
  OUT_OF_BOUNDS,
  RACE,
  RACE_BETWEEN_THREADGROUPS,
  UNINITIALISED_READ,
  MISALIGNED,
  DIVERGENT_BARRIER,
  DEADLOCK,
  FAULT,
  THREADGROUP_MEMORY,
  WRITE_TO_CONSTANT,
  STACK_ESCAPE,
  ARRAY_INDEX,
  PARTIAL_SIMDGROUP,
  UNBOUND_BUFFER,
};

constexpr uint32_t NOBODY = 0xFFFFFFFF;
constexpr int MAX_REPORTS = 100;   // distinct ones of a launch

struct Report {
  uint32_t kind;
  uint32_t thread, threadgroup;               // linear; NOBODY: outside any thread
  uint32_t other_thread, other_threadgroup;   // of the access or wait that this one collides with
  uint32_t times;
  uint64_t address, other_address;            // in the kernel library's code, of the next instruction; 0: none
  char location[128];                         // file:line where it is known without debug information
  char message[256];
};

// In the order of device.py's results. The first ones are SIM_MATRIX_… of engine.h.
enum Counter {
  DEVICE_LOADS = SIM_MATRIX_COUNTERS,         // accesses of single threads, checked builds only; so are the next seven
  DEVICE_STORES,
  DEVICE_BYTES_READ,
  DEVICE_BYTES_WRITTEN,
  THREADGROUP_LOADS,
  THREADGROUP_STORES,
  THREADGROUP_BYTES_READ,
  THREADGROUP_BYTES_WRITTEN,
  ATOMIC_OPERATIONS,
  THREADGROUP_BARRIERS,                       // one per threadgroup and barrier
  SIMDGROUP_BARRIERS,                         // one per simdgroup and barrier
  SIMD_OPERATIONS,                            // one per simdgroup and collective
  THREADGROUPS,
  THREADGROUP_MEMORY_BYTES,                   // of one threadgroup, the largest
  COUNTERS,
};

struct Launch {
  const SimLibrary *library;
  const SimKernel *kernel;
  void *buffers[SIM_BUFFERS];                 // null: not bound
  const int32_t *constant_indices;            // function constants that are set, constant_count of them
  const void *const *constant_values;
  uint64_t buffer_bytes[SIM_BUFFERS];         // from the bound offset to the buffer's end
  uint32_t threadgroup_bytes[SIM_BUFFERS];    // of [[threadgroup(n)]] arguments
  uint32_t threads_per_grid[3];
  uint32_t threads_per_threadgroup[3];
  uint32_t constant_count;
  uint32_t workers;                           // OS threads, at most
  uint32_t at_once;                           // all of them start at once; else when there is enough to do
  uint32_t seed;                              // 0: threads and threadgroups in order; else shuffled; odd: backwards
  uint32_t sum_order;                         // SimThreadgroup's
  uint32_t flush_to_zero;                     // denormal floats, as Apple's GPUs do by default
  uint32_t granularity;                       // bytes of a shadow cell, 1 or 2
  uint32_t time_limit;                        // seconds, 0: none
  // Results.
  uint32_t report_count;
  uint32_t accumulators, matrices;            // simdgroup matrices of the first thread of the first threadgroup
  int64_t counters[COUNTERS];
  Report reports[MAX_REPORTS];
};

#pragma GCC visibility push(default)
extern "C" {
// Null with a word in *why when there is no room.
void *sim_allocate(uint64_t bytes, const char *name, const char **why);
// Makes `bytes` at `memory` (the caller's, which outlives it) known as a buffer.
void *sim_adopt(void *memory, uint64_t bytes, const char *name, const char **why);
void sim_protect(void *buffer, int readonly);
void sim_free(void *buffer);

// Sets a library's function constants as a launch with these does; SimArgument::exists then tells what it declares.
void sim_specialise(const SimLibrary *library, const int32_t *indices, const void *const *values, uint32_t count);

// One launch runs at a time: a library's function constants are variables.
void sim_launch(Launch *launch);

uint64_t sim_image_base(const void *address);   // where the library with this address is loaded
uint64_t sim_layout(int which);                 // sizeof(Report), sizeof(Launch), COUNTERS: device.py compares
}
#pragma GCC visibility pop
