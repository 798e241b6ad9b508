// Checks of loads and stores: where they go, whether barriers order them, whether they read what was written.

#include "access.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

namespace sim {

static const char *verb(const Checked &access) {
  return access.atomic ? "atomic operation" : access.writes ? "write" : "read";
}

// ---- Order --------------------------------------------------------------------------------------------------

// Cells of device memory may be touched by several workers at once.
static char cell_locks[1024];

void open_cell_locks() { memset(cell_locks, 0, sizeof cell_locks); }

struct CellLock {
  char *taken;
  CellLock(const Worker &w, uintptr_t address) : taken(w.shared ? &cell_locks[address / 64 % 1024] : nullptr) {
    if (taken)
      while (__atomic_exchange_n(taken, 1, __ATOMIC_ACQUIRE)) {}
  }
  ~CellLock() {
    if (taken) __atomic_store_n(taken, 0, __ATOMIC_RELEASE);
  }
};

struct Space {
  const char *kind, *name;    // for reports: "buffer 'x'"
  Cell *cells;
  uint16_t epoch, simd_epoch;
  uint32_t oldest;            // stamps below are of earlier launches (device) or threadgroups (threadgroup memory)
};

struct Clash {
  Access then;
  bool found, then_writes;
};

// Looks at and updates the cells of the access, which begins `offset` bytes into the space.
static Clash update_cells(Worker &w, const Checked &access, const Space &space, uintptr_t offset) {
  Clash clash = {};
  Access now = {};
  now.address = (uint32_t)((uintptr_t)access.code - w.image);
  now.stamp = w.stamp;
  now.thread = (uint16_t)w.current->thread.thread_index_in_threadgroup;
  now.epoch = space.epoch;
  now.simd_epoch = space.simd_epoch;
  now.atomic = access.atomic;
  const unsigned shift = w.launch->granularity == 1 ? 0 : 1;
  const uintptr_t end = offset + access.bytes;
  for (uintptr_t i = offset >> shift; i <= (end - 1) >> shift; i++) {
    now.bytes = shift ? 3 : 1;
    if (i << shift < offset) now.bytes &= 2;
    if ((i + 1) << shift > end) now.bytes &= 1;
    Cell &cell = space.cells[i];
    if (!clash.found)
      if (const Access *then = cell.clash(now, access.writes, space.oldest)) {
        clash = {*then, true, then == &cell.write};
      }
    if (access.writes) cell.record_write(now);
    else cell.record_read(now, space.oldest);
  }
  return clash;
}

static void check_order(Worker &w, const Checked &access, const Space &space, uintptr_t offset, bool locked) {
  Clash clash;
  if (locked) {
    CellLock lock(w, access.address);
    clash = update_cells(w, access, space, offset);
  } else {
    clash = update_cells(w, access, space, offset);
  }
  if (!clash.found) return;
  const Access &then = clash.then;
  const bool elsewhere = then.stamp != w.stamp;
  const uint32_t threadgroup =
      elsewhere ? threadgroup_at(*w.launch, w.threadgroup_count, then.stamp - w.first_stamp) : w.threadgroup_index;
  report_both(elsewhere ? RACE_BETWEEN_THREADGROUPS : RACE, access.code,
              {(const void *)(w.image + then.address), then.thread, threadgroup},
              "%s of %u bytes at byte %llu of %s '%s' is not ordered after %s", verb(access), access.bytes,
              (unsigned long long)offset, space.kind, space.name,
              then.atomic ? "an atomic operation" : clash.then_writes ? "a write" : "a read");
}

// ---- Places -------------------------------------------------------------------------------------------------

// Beside every array: in a redzone, or in what no array has taken.
static void report_outside_arrays(Worker &w, const Checked &access, long offset) {
  const ThreadgroupArray *nearest = nullptr;
  long past = 0;
  for (int i = 0; i < w.array_count; i++) {
    const ThreadgroupArray &array = w.arrays[i];
    const long begin = array.offset, end = begin + array.bytes;
    const long beyond = offset + access.bytes > end ? offset + access.bytes - end : offset - begin;
    if (nearest && labs(beyond) >= labs(past)) continue;
    nearest = &array;
    past = beyond;
  }
  if (!nearest) {
    report(OUT_OF_BOUNDS, access.code, "%s of %u bytes of threadgroup memory, of which there is none",
           verb(access), access.bytes);
    return;
  }
  report(OUT_OF_BOUNDS, access.code, "%s of %u bytes at byte %ld of threadgroup array '%s' of %u bytes",
         verb(access), access.bytes, offset - (long)nearest->offset, nearest->name, nearest->bytes);
}

static void check_threadgroup_memory(Worker &w, const Checked &access) {
  const uintptr_t offset = access.address - (uintptr_t)w.arena;
  w.counters[access.writes ? THREADGROUP_STORES : THREADGROUP_LOADS]++;
  w.counters[access.writes ? THREADGROUP_BYTES_WRITTEN : THREADGROUP_BYTES_READ] += access.bytes;
  const ThreadgroupArray *array = w.arrays, *end = w.arrays + w.array_count;
  while (array < end && !(offset >= array->offset && offset + access.bytes <= array->offset + array->bytes)) array++;
  if (array == end) {
    report_outside_arrays(w, access, (long)offset);
    return;
  }
  if (access.writes) {
    memset(w.arena_written + offset, 1, access.bytes);
  } else if (memchr(w.arena_written + offset, 0, access.bytes)) {
    report(UNINITIALISED_READ, access.code,
           "read of %u bytes at byte %u of threadgroup array '%s', which no thread has written", access.bytes,
           (unsigned)(offset - array->offset), array->name);
  }
  // Cells are indexed from the arena's start, messages count from the array's.
  const Epochs &simdgroup = w.current->simdgroup->epochs;
  const Space space = {"threadgroup array", array->name, w.arena_cells + array->offset, w.epochs.threadgroup,
                       simdgroup.threadgroup, w.stamp};
  check_order(w, access, space, offset - array->offset, false);
}

static void check_device_memory(Worker &w, const Checked &access, const Allocation *buffer) {
  w.counters[access.writes ? DEVICE_STORES : DEVICE_LOADS]++;
  w.counters[access.writes ? DEVICE_BYTES_WRITTEN : DEVICE_BYTES_READ] += access.bytes;
  if (!buffer) {
    const int index = device_memory.unbound_index(access.address);
    if (index >= 0)
      report(UNBOUND_BUFFER, access.code, "%s of %u bytes through argument %d, to which nothing is bound",
             verb(access), access.bytes, index);
    else
      report(OUT_OF_BOUNDS, access.code, "%s of %u bytes between all buffers", verb(access), access.bytes);
    abandon_launch(w);
  }
  const uintptr_t end = access.address + access.bytes;
  const long offset = (long)(access.address - buffer->begin);
  if (access.address < buffer->begin || end > buffer->end) {
    report(OUT_OF_BOUNDS, access.code, "%s of %u bytes at byte %ld of buffer '%s' of %llu bytes", verb(access),
           access.bytes, offset, buffer->name, (unsigned long long)(buffer->end - buffer->begin));
    if (access.address < buffer->mapped || end > buffer->mapped_end) abandon_launch(w);
    return;
  }
  if (buffer->stamp != w.first_stamp) {
    report(OUT_OF_BOUNDS, access.code,
           "%s of %u bytes at byte %ld of buffer '%s', which this launch does not bind", verb(access), access.bytes,
           offset, buffer->name);
    return;
  }
  if (buffer->readonly && access.writes) {
    report(WRITE_TO_CONSTANT, access.code, "%s of %u bytes at byte %ld of buffer '%s', which is read-only",
           verb(access), access.bytes, offset, buffer->name);
    if (!buffer->adopted) abandon_launch(w);   // its pages cannot be written
    return;
  }
  if (!buffer->written) {   // nothing to order reads with
    if (access.writes)
      report(WRITE_TO_CONSTANT, access.code,
             "%s of %u bytes at byte %ld of buffer '%s', which the kernel's parameter says is const", verb(access),
             access.bytes, offset, buffer->name);
    return;
  }
  if (!buffer->cells) return;
  const Epochs &simdgroup = w.current->simdgroup->epochs;
  const Space space = {"buffer", buffer->name, buffer->cells, w.epochs.device, simdgroup.device, w.first_stamp};
  check_order(w, access, space, (uintptr_t)offset, true);
}

// Memory of the simulator itself.
static void check_worker_memory(Worker &w, const Checked &access) {
  const uintptr_t own = access.address - (uintptr_t)&w;
  const WorkerMemory &memory = worker_memory;
  if (own < memory.stride) {
    if (access.address - (uintptr_t)w.arena < ARENA_BYTES) return check_threadgroup_memory(w, access);
    if (own < memory.stacks_offset) return;   // what the header reads of the thread, and the lanes' gathered values
    const uintptr_t thread = (own - memory.stacks_offset) / memory.stack_stride;
    if (thread == w.current->thread.thread_index_in_threadgroup) return;
    report_both(STACK_ESCAPE, access.code, {nullptr, (uint32_t)thread, w.threadgroup_index},
                "%s of %u bytes of another thread's own (`thread`) memory", verb(access), access.bytes);
    return;
  }
  report(STACK_ESCAPE, access.code, "%s of %u bytes of another threadgroup's memory", verb(access),
         access.bytes);
}

// Constants and other global variables of the kernel library are harmless.
static bool is_global(Worker &w, uintptr_t address) {
  const uintptr_t page = address / 4096;
  if (page == w.harmless_page) return true;
  Dl_info info;
  if (!dladdr((void *)address, &info) || (uintptr_t)info.dli_fbase != w.image) return false;
  w.harmless_page = page;
  return true;
}

// Other memory is the host's.
static void check_other_memory(Worker &w, const Checked &access) {
  if (is_global(w, access.address)) return;
  report(OUT_OF_BOUNDS, access.code, "%s of %u bytes at an address in no buffer", verb(access), access.bytes);
  abandon_launch(w);
}

void check_access(Worker &w, const Checked &access) {
  if (access.address - worker_memory.base < worker_memory.stride * MAX_WORKERS) return check_worker_memory(w, access);
  const Allocation *buffer = device_memory.find(access.address);
  // The host may have given back memory that a buffer adopted, and the library may have been loaded there.
  if (buffer && buffer->adopted && buffer->stamp != w.first_stamp && is_global(w, access.address)) return;
  if (buffer || device_memory.contains(access.address)) return check_device_memory(w, access, buffer);
  check_other_memory(w, access);
}

}  // namespace sim
