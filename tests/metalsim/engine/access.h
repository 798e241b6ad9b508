// The checks of one access, in checked builds.
#pragma once

#include "memory.h"
#include "worker.h"

namespace sim {

struct Checked {
  uintptr_t address;
  uint32_t bytes;
  bool writes, atomic;
  const void *code;             // the instruction after it
};

// Counts the access and reports what is wrong with it. Does not return when nothing is mapped at the address.
void check_access(Worker &w, const Checked &access);

}  // namespace sim
