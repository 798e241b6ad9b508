#include "memory.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "host.h"
#include "worker.h"

#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0   // macOS: address space costs nothing there
#endif

namespace sim {

DeviceMemory device_memory;
WorkerMemory worker_memory;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void *reserve(size_t bytes, int protection) {
  void *memory = mmap(nullptr, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}

static uintptr_t page_size() {
  static const uintptr_t bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
  return bytes;
}

static uintptr_t round_up(uintptr_t value, uintptr_t unit) { return (value + unit - 1) / unit * unit; }

const char *reserve_device_memory() {
  DeviceMemory &memory = device_memory;
  if (memory.base) return nullptr;
  const struct { int shift, slots; } sizes[] = {{32, 2048}, {30, 2048}, {28, 1024}, {26, 1024}};   // 8 TiB … 64 GiB
  for (auto size : sizes)
    if (void *base = reserve((size_t)size.slots << size.shift, PROT_NONE)) {
      memory.shift = size.shift;
      memory.slot_count = size.slots;
      memory.base = (uintptr_t)base;
      return nullptr;
    }
  return "the system does not reserve 64 GiB of address space (see `ulimit -v`)";
}

// The first of `count` free slots side by side, or 0.
static int free_slots(int count) {
  static int start = 1;   // slots are reused as late as possible, so that a stale pointer finds nothing
  for (int tries = 0; tries < 2; tries++) {
    for (int first = start; first + count <= device_memory.slot_count; first++) {
      int n = 0;
      while (n < count && !device_memory.of_slot[first + n]) n++;
      if (n == count) {
        start = first + count;
        return first;
      }
      first += n;
    }
    start = 1;
  }
  return 0;
}

static void set_up(Allocation &allocation, const char *name) {
  allocation.anonymous = !*name;
  snprintf(allocation.name, sizeof allocation.name, "%s", name);
  allocation.used = true;
  allocation.readonly = false;
  allocation.stamp = 0;
  allocation.cells = nullptr;
}

static size_t cell_bytes(const Allocation &allocation) {
  return (allocation.end - allocation.begin + 1) * sizeof(Cell);
}

void bind(void *buffer, const char *argument, uint32_t stamp, bool written, bool checked) {
  Allocation *allocation = device_memory.find((uintptr_t)buffer);
  if (!allocation) return;
  if (allocation->anonymous && allocation->stamp != stamp)
    snprintf(allocation->name, sizeof allocation->name, "%s", argument);
  allocation->written = written || (allocation->stamp == stamp && allocation->written);
  allocation->stamp = stamp;
  if (!checked || !written || allocation->cells) return;
  allocation->cells = (Cell *)reserve(cell_bytes(*allocation), PROT_READ | PROT_WRITE);
  if (!allocation->cells)
    report(FAULT, nullptr, "the system has no room to check buffer '%s' in (see `ulimit -v`)", allocation->name);
}

static void *allocate(uint64_t bytes, const char *name, const char **why) {
  if ((*why = reserve_device_memory())) return nullptr;
  DeviceMemory &memory = device_memory;
  const uintptr_t mapped = bytes ? round_up(bytes, page_size()) : page_size();
  const uintptr_t slot = (uintptr_t)1 << memory.shift;
  const int count = (int)((mapped + 2 * page_size() + slot - 1) >> memory.shift);
  const int first = free_slots(count);
  if (!first) {
    *why = "there is no room for one more buffer in the simulator's address space";
    return nullptr;
  }
  Allocation &allocation = memory.slots[first];
  // Pages lie in the middle of what the slots leave: an index that is negative by little faults as well.
  allocation.mapped = memory.base + first * slot + (count * slot - mapped) / 2 / page_size() * page_size();
  allocation.mapped_end = allocation.mapped + mapped;
  allocation.begin = allocation.mapped_end - round_up(bytes ? bytes : 1, 16);
  allocation.end = allocation.begin + bytes;
  allocation.slots = count;
  allocation.adopted = false;
  if (mprotect((void *)allocation.mapped, mapped, PROT_READ | PROT_WRITE)) {
    *why = "the system has no memory left";
    return nullptr;
  }
  set_up(allocation, name);
  for (int i = 0; i < count; i++) memory.of_slot[first + i] = &allocation;
  return (void *)allocation.begin;
}

static void *adopt(void *begin, uint64_t bytes, const char *name, const char **why) {
  if ((*why = reserve_device_memory())) return nullptr;
  DeviceMemory &memory = device_memory;
  int i = 0;
  while (i < memory.adopted_count && memory.adopted[i].used) i++;
  if (i == MAX_ADOPTED) {
    *why = "there are too many buffers that use the caller's memory";
    return nullptr;
  }
  Allocation &allocation = memory.adopted[i];
  allocation.begin = allocation.mapped = (uintptr_t)begin;
  allocation.end = allocation.mapped_end = allocation.begin + bytes;
  allocation.adopted = true;
  set_up(allocation, name);
  if (i == memory.adopted_count) memory.adopted_count++;
  return begin;
}

static void release(Allocation &allocation) {
  if (allocation.cells) munmap(allocation.cells, cell_bytes(allocation));
  allocation.used = false;
  if (allocation.adopted) return;
  void *mapped = (void *)allocation.mapped;
  const size_t bytes = allocation.mapped_end - allocation.mapped;
  // Mapping anew gives the memory back and leaves the address space reserved.
  mmap(mapped, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  const int first = (int)(&allocation - device_memory.slots);
  for (int i = 0; i < allocation.slots; i++) device_memory.of_slot[first + i] = nullptr;
}

// ---- Workers ------------------------------------------------------------------------------------------------

static bool taken[MAX_WORKERS];
static bool made[MAX_WORKERS];

static bool reserve_worker_memory() {
  WorkerMemory &memory = worker_memory;
  if (memory.base) return true;
  memory.page = page_size();
  // An odd number of pages apart, so that the stacks of a simdgroup do not fall on the same cache sets.
  memory.stack_stride = memory.page < 16384 ? 33 * memory.page : 9 * memory.page;
  memory.stacks_offset = round_up(round_up(sizeof(Worker), 64) + ARENA_BYTES, memory.page);
  memory.stride = memory.stacks_offset + MAX_THREADS * memory.stack_stride;
  memory.base = (uintptr_t)reserve(memory.stride * MAX_WORKERS, PROT_NONE);
  return memory.base != 0;
}

static bool make_worker(Worker &made_worker) {
  const WorkerMemory &memory = worker_memory;
  if (mprotect(&made_worker, memory.stride, PROT_READ | PROT_WRITE)) return false;
  made_worker.arena = (char *)&made_worker + round_up(sizeof(Worker), 64);
  made_worker.stacks = (char *)&made_worker + memory.stacks_offset;
  for (int i = 0; i < MAX_THREADS; i++)   // the lowest page of each stack ends it
    if (mprotect(made_worker.stacks + i * memory.stack_stride, memory.page, PROT_NONE)) return false;
  made_worker.arena_cells = (Cell *)reserve(ARENA_BYTES * sizeof(Cell), PROT_READ | PROT_WRITE);
  made_worker.arena_written = (uint8_t *)reserve(ARENA_BYTES, PROT_READ | PROT_WRITE);
  memset(made_worker.arena, 0xFF, ARENA_BYTES);
  return made_worker.arena_cells && made_worker.arena_written;
}

Worker *acquire_worker() {
  pthread_mutex_lock(&lock);
  Worker *found = nullptr;
  if (reserve_worker_memory())
    for (int i = 0; i < MAX_WORKERS && !found; i++) {
      if (taken[i]) continue;
      Worker *candidate = (Worker *)(worker_memory.base + i * worker_memory.stride);
      if (!made[i] && !make_worker(*candidate)) break;
      made[i] = taken[i] = true;
      found = candidate;
    }
  pthread_mutex_unlock(&lock);
  return found;
}

void release_worker(Worker *released) {
  pthread_mutex_lock(&lock);
  taken[((uintptr_t)released - worker_memory.base) / worker_memory.stride] = false;
  pthread_mutex_unlock(&lock);
}

static Allocation *allocation_of(void *buffer) {
  Allocation *allocation = device_memory.find((uintptr_t)buffer);
  return allocation && allocation->begin == (uintptr_t)buffer ? allocation : nullptr;
}

}  // namespace sim

extern "C" {

void *sim_allocate(uint64_t bytes, const char *name, const char **why) {
  pthread_mutex_lock(&sim::lock);
  void *buffer = sim::allocate(bytes, name, why);
  pthread_mutex_unlock(&sim::lock);
  return buffer;
}

void *sim_adopt(void *memory, uint64_t bytes, const char *name, const char **why) {
  pthread_mutex_lock(&sim::lock);
  void *buffer = sim::adopt(memory, bytes, name, why);
  pthread_mutex_unlock(&sim::lock);
  return buffer;
}

void sim_protect(void *buffer, int readonly) {
  pthread_mutex_lock(&sim::lock);
  if (sim::Allocation *allocation = sim::allocation_of(buffer)) {
    allocation->readonly = readonly;
    if (!allocation->adopted)
      mprotect((void *)allocation->mapped, allocation->mapped_end - allocation->mapped,
               readonly ? PROT_READ : PROT_READ | PROT_WRITE);
  }
  pthread_mutex_unlock(&sim::lock);
}

void sim_free(void *buffer) {
  pthread_mutex_lock(&sim::lock);
  if (sim::Allocation *allocation = sim::allocation_of(buffer)) sim::release(*allocation);
  pthread_mutex_unlock(&sim::lock);
}

uint64_t sim_image_base(const void *address) {
  Dl_info info;
  return dladdr(address, &info) ? (uint64_t)info.dli_fbase : 0;
}
}
