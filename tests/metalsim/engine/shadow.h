// What the checker remembers of each cell (1 or 2 bytes) of memory: the last write and two reads.
#pragma once

#include <stdint.h>

namespace sim {

// Barriers passed, for each memory they order. Of a threadgroup, and of each simdgroup.
struct Epochs {
  uint16_t device, threadgroup;
};

struct Access {
  uint32_t address;         // code that did it, from the kernel library's base
  uint32_t stamp;           // threadgroup
  uint16_t thread;
  uint16_t epoch;           // of the threadgroup
  uint16_t simd_epoch;      // of the simdgroup
  uint8_t bytes;            // bit i: byte i of the cell; 0: no access
  bool atomic;
};

// How far two accesses are from being ordered. Only the last one is: by a barrier, or as steps of one thread.
enum Distance { ORDERED, SAME_SIMDGROUP, SAME_THREADGROUP, ELSEWHERE };

inline Distance distance(const Access &one, const Access &two) {
  if (one.stamp != two.stamp) return ELSEWHERE;
  if (one.thread == two.thread || one.epoch != two.epoch) return ORDERED;
  if (one.thread / 32 != two.thread / 32) return SAME_THREADGROUP;
  return one.simd_epoch == two.simd_epoch ? SAME_SIMDGROUP : ORDERED;
}

struct Cell {
  Access write;
  Access read, far_read;    // the latest, and the one known that is farthest from it

  // The earlier access that `now` races with, or null. Accesses with a stamp below `oldest` are of earlier launches.
  __attribute__((always_inline)) const Access *clash(const Access &now, bool writes, uint32_t oldest) const {
    if (races(write, now, oldest)) return &write;
    if (!writes) return nullptr;
    if (races(read, now, oldest)) return &read;
    return races(far_read, now, oldest) ? &far_read : nullptr;
  }

  void record_write(const Access &now) { write = now; }

  // Two reads are enough: of several that are not ordered before a later write, one that the writer's own thread,
  // simdgroup or threadgroup did not do is always among them.
  __attribute__((always_inline)) void record_read(const Access &now, uint32_t oldest) {
    if (read.bytes && read.stamp >= oldest) {
      const Distance to_last = distance(read, now);
      if (to_last == ORDERED && read.thread == now.thread && read.epoch == now.epoch &&
          read.simd_epoch == now.simd_epoch) {   // the same thread again
        read.bytes |= now.bytes;
        read.atomic &= now.atomic;
        return;
      }
      const Distance to_far = far_read.bytes && far_read.stamp >= oldest ? distance(far_read, now) : ORDERED;
      if (to_last != ORDERED && to_last >= to_far) far_read = read;
    } else {
      far_read.bytes = 0;
    }
    read = now;
  }

 private:
  static bool races(const Access &then, const Access &now, uint32_t oldest) {
    if (!(then.bytes & now.bytes) || then.stamp < oldest) return false;
    if (then.atomic && now.atomic) return false;
    return distance(then, now) != ORDERED;
  }
};

}  // namespace sim
