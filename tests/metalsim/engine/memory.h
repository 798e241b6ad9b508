// Device memory. Every buffer has a slot of address space of its own, whose unused part is unmapped, so that even
// fast builds fault on an overrun: a buffer's end lies less than 16 bytes before an unmapped page.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "shadow.h"

namespace sim {

struct Allocation {
  uintptr_t begin, end;             // what kernels may use
  uintptr_t mapped, mapped_end;     // whole pages; of adopted memory, equal to begin and end
  bool used, adopted, readonly;
  int slots;
  bool anonymous;                   // it goes by the name of the argument that it is bound to
  char name[48];
  uint32_t stamp;                   // the first one of the last launch that bound it
  bool written;                     // that launch's kernel may write to it: some argument is not const
  Cell *cells;                      // shadow; room for one per byte, of which only touched pages take memory
};

constexpr int MAX_SLOTS = 2048;
constexpr int MAX_ADOPTED = 1024;

struct DeviceMemory {
  uintptr_t base;
  int shift;                        // log2 of a slot's bytes
  int slot_count;
  Allocation *of_slot[MAX_SLOTS];   // slot 0 stands for buffers that are not bound
  Allocation slots[MAX_SLOTS];
  Allocation adopted[MAX_ADOPTED];
  int adopted_count;                // highest used one + 1

  bool contains(uintptr_t address) const { return address - base < (uintptr_t)slot_count << shift; }

  // The allocation whose slot the address lies in; null for a free slot.
  Allocation *find(uintptr_t address) {
    if (contains(address)) return of_slot[(address - base) >> shift];
    for (int i = 0; i < adopted_count; i++)
      if (adopted[i].used && address - adopted[i].begin < adopted[i].end - adopted[i].begin) return &adopted[i];
    return nullptr;
  }

  // Where a kernel is sent that uses an argument nobody bound: nothing is mapped there.
  void *unbound(int index) const { return (void *)(base + ((uintptr_t)index << (shift - 5))); }
  // The index of that argument, or -1.
  int unbound_index(uintptr_t address) const {
    return address - base < (uintptr_t)1 << shift ? (int)((address - base) >> (shift - 5)) : -1;
  }
};

extern DeviceMemory device_memory;
const char *reserve_device_memory();   // null, or why not
// Notes that the launch with this first stamp uses the buffer (an address in it) for an argument of this name. One
// that is `written` to gets a shadow in checked builds.
void bind(void *buffer, const char *argument, uint32_t stamp, bool written, bool checked);

}  // namespace sim
