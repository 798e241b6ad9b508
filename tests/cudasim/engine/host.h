// What Python asks of the engine. device.py describes the same structures.
#pragma once

#include "engine.h"

namespace cudasim {

// A matrix from which the copy engine fetches boxes. device.py packs it.
struct TensorMap {
  u64 address, row_bytes;
  u32 rows, columns, box_rows, box_columns, element_bytes, mark;
};
constexpr u32 kTensorMapMark = 0x7E4501A9;

constexpr int kMostWaits = 24;

// Where something is: the place of a call into the engine, and that of the call to the function around it.
struct Place {
  u64 inner, outer;
};

struct Waiting {
  Place place;
  u32 first, count, block;  // threads, of a block of the cluster
  char what[116];
};

struct Report {
  char kind[32];
  char message[320];
  Place place;
  Index block;
  u32 thread;
  u32 wait_count;  // in a deadlock
  Waiting waits[kMostWaits];
};

struct Launch {
  void (*kernel)(void **);
  void **arguments;
  Index grid;
  u32 threads, shared, cluster, order, seconds;
  u32 beside;  // it may touch memory before it has waited
  Report report;
};

}  // namespace cudasim

#pragma GCC visibility push(default)
extern "C" {
// Memory between guard pages, aligned to 64 bytes. `name` is copied.
void *cudasim_allocate(cudasim::u64 bytes, const char *name);
void cudasim_free(void *);
// Runs a kernel over its grid. False: it was stopped, and the report says why.
bool cudasim_launch(cudasim::Launch *);
cudasim::u64 cudasim_layout(int which);  // sizes of Report and Launch
cudasim::u64 cudasim_image_base(const void *code);
}
#pragma GCC visibility pop
