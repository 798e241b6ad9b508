// A launch: its arguments, its function constants, and the memory of its threadgroups.

#include <pthread.h>
#include <string.h>

#include "memory.h"
#include "worker.h"

namespace sim {

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static uint32_t next_stamp = 1;

// ---- Arguments ----------------------------------------------------------------------------------------------

static void specialise(const SimLibrary &library, const int32_t *indices, const void *const *values, uint32_t count) {
  for (int i = 0; i < library.constant_count; i++) {
    const SimConstant &constant = library.constants[i];
    memset(constant.value, 0, constant.bytes);
    if (constant.defined) *constant.defined = false;
    for (uint32_t k = 0; k < count; k++)
      if (indices[k] == constant.index) {
        memcpy(constant.value, values[k], constant.bytes);
        if (constant.defined) *constant.defined = true;
      }
  }
  if (library.derive) library.derive();
}

static const SimArgument *find_argument(const SimKernel &kernel, int kind, int index) {
  for (int i = 0; i < kernel.argument_count; i++) {
    const SimArgument &argument = kernel.arguments[i];
    if (argument.kind == kind && argument.index == index && (!argument.exists || *argument.exists)) return &argument;
  }
  return nullptr;
}

// Whether everything is bound that this specialisation of the kernel declares.
static bool check_arguments(const Launch &launch) {
  const SimKernel &kernel = *launch.kernel;
  for (int i = 0; i < kernel.argument_count; i++) {
    const SimArgument &argument = kernel.arguments[i];
    if (argument.exists && !*argument.exists) continue;
    if (argument.kind == SIM_ARGUMENT_THREADGROUP) {
      if (!launch.threadgroup_bytes[argument.index])
        report(UNBOUND_BUFFER, nullptr, "%s: no length is set for threadgroup argument %d, '%s'",
               kernel.name, argument.index, argument.name);
    } else if (!launch.buffers[argument.index]) {
      report(UNBOUND_BUFFER, nullptr, "%s: nothing is bound to argument %d, '%s'", kernel.name,
             argument.index, argument.name);
    } else if (launch.buffer_bytes[argument.index] < argument.bytes) {
      report(OUT_OF_BOUNDS, nullptr, "%s: argument %d, '%s', has %llu of the %u bytes it needs",
             kernel.name, argument.index, argument.name, (unsigned long long)launch.buffer_bytes[argument.index],
             argument.bytes);
    }
  }
  return launch.report_count == 0;
}

static void bind_buffers(const Launch &launch, uint32_t stamp) {
  for (int i = 0; i < SIM_BUFFERS; i++) {
    if (!launch.buffers[i]) continue;
    const SimArgument *argument = find_argument(*launch.kernel, SIM_ARGUMENT_BUFFER, i);
    const bool written = !argument || argument->writable;
    bind(launch.buffers[i], argument ? argument->name : "", stamp, written, launch.library->checked);
  }
}

// ---- Threadgroup memory -------------------------------------------------------------------------------------

static void *add_array(Worker &w, const void *key, uint32_t bytes, uint32_t alignment, const char *name,
                       const void *code) {
  alignment = alignment < 16 ? 16 : alignment;
  const uint32_t offset = (w.arena_used + alignment - 1) / alignment * alignment;
  const uint32_t end = offset + bytes + (w.checked ? REDZONE : 0);
  const bool was_over = w.memory_used > THREADGROUP_LIMIT;
  w.memory_used += (bytes + 15) / 16 * 16;
  if (w.memory_used > THREADGROUP_LIMIT && !was_over)
    report(THREADGROUP_MEMORY, code,
           "with '%s' of %u bytes the threadgroup needs %u bytes; there are %u", name, bytes, w.memory_used,
           THREADGROUP_LIMIT);
  if (w.counters[THREADGROUP_MEMORY_BYTES] < w.memory_used) w.counters[THREADGROUP_MEMORY_BYTES] = w.memory_used;
  if (end > ARENA_BYTES || w.array_count == MAX_ARRAYS) {
    report(THREADGROUP_MEMORY, code, "the simulator has no room for '%s' of %u bytes", name,
           bytes);
    abandon_launch(w);
  }
  w.arrays[w.array_count++] = {key, offset, bytes, name};
  w.arena_used = end;
  return w.arena + offset;
}

void begin_threadgroup_memory(Worker &w) {
  memset(w.arena, 0xFF, w.arena_used);
  if (w.checked) memset(w.arena_written, 0, w.arena_used);
  w.arena_used = w.memory_used = 0;
  w.array_count = 0;
  for (int i = 0; i < SIM_BUFFERS; i++) {
    const uint32_t bytes = w.launch->threadgroup_bytes[i];
    const SimArgument *argument = find_argument(*w.launch->kernel, SIM_ARGUMENT_THREADGROUP, i);
    w.threadgroup.threadgroup_buffers[i] =
        bytes ? add_array(w, nullptr, bytes, 16, argument ? argument->name : "(no argument)", nullptr) : nullptr;
  }
}

static void run(Launch &launch) {
  Grid grid = {};
  grid.count = 1;
  for (int i = 0; i < 3; i++) {
    const uint32_t size = launch.threads_per_threadgroup[i];
    grid.threadgroups[i] = (launch.threads_per_grid[i] + size - 1) / size;
    grid.count *= grid.threadgroups[i];
  }
  if (!grid.count) return;
  grid.first_stamp = next_stamp;
  next_stamp += grid.count;
  bind_buffers(launch, grid.first_stamp);
  if (launch.report_count) return;
  open_cell_locks();
  catch_faults();
  run_workers(launch, grid);
  stop_catching_faults();
}

}  // namespace sim

extern "C" {

void *sim_threadgroup_array(const void *key, unsigned long bytes, unsigned long alignment, const char *name) {
  sim::Worker &w = *sim::worker;
  for (int i = 0; i < w.array_count; i++)
    if (w.arrays[i].key == key) return w.arena + w.arrays[i].offset;
  return sim::add_array(w, key, (uint32_t)bytes, (uint32_t)alignment, name, __builtin_return_address(0));
}

void sim_specialise(const SimLibrary *library, const int32_t *indices, const void *const *values, uint32_t count) {
  pthread_mutex_lock(&sim::lock);
  sim::specialise(*library, indices, values, count);
  pthread_mutex_unlock(&sim::lock);
}

void sim_launch(Launch *launch) {
  pthread_mutex_lock(&sim::lock);
  sim::begin_reports(launch);
  memset(launch->counters, 0, sizeof launch->counters);
  launch->accumulators = launch->matrices = 0;
  sim::specialise(*launch->library, launch->constant_indices, launch->constant_values, launch->constant_count);
  if (sim::check_arguments(*launch)) sim::run(*launch);
  pthread_mutex_unlock(&sim::lock);
}

uint64_t sim_layout(int which) {
  const uint64_t sizes[] = {sizeof(Report), sizeof(Launch), COUNTERS};
  return sizes[which];
}
}
