// Which fiber runs: barriers, the collectives of a simdgroup, and what happens when lanes diverge.

#include <string.h>

#include "worker.h"

namespace sim {

__thread Worker *worker __attribute__((tls_model("initial-exec")));

static void fiber_main();

static void go_to(Worker &w, Fiber *next) {
  Fiber *before = w.current;
  if (next == before) return;
  w.current = next;
  switch_stack(&before->stack_pointer, next->stack_pointer);
}

void abandon_launch(Worker &w) {
  w.abandoned = true;
  if (w.current) {
    void *nowhere;
    switch_stack(&nowhere, w.main_stack);
  }
  siglongjmp(w.escape, 1);
}

static bool same_wait(const Fiber *one, const Fiber *two) {
  if (one->wait != two->wait || one->detail != two->detail) return false;
  return one->site == two->site || one->wait == Wait::flush;
}

static void set_runnable(Worker &w, Simdgroup &group, uint32_t slots) {
  group.runnable |= slots;
  w.runnable_simdgroups |= 1u << group.index;
}

static void clear_runnable(Worker &w, Fiber *fiber) {
  Simdgroup &group = *fiber->simdgroup;
  group.runnable &= ~(1u << fiber->slot);
  if (!group.runnable) w.runnable_simdgroups &= ~(1u << group.index);
}

// Moves what the lanes have given to where they read it. Lanes of a diverged simdgroup may have given values of
// different sizes, so each gives in a place of its own.
template <size_t known_bytes>
static void collect(Simdgroup &group, size_t bytes) {
  if (known_bytes) bytes = known_bytes;
  for (uint32_t rest = group.active; rest; rest &= rest - 1) {
    const size_t lane = __builtin_ctz(rest);
    memcpy(group.gathered + lane * bytes, group.given[lane], bytes);
  }
}

// The slots of the lanes that wait for the same as the one that has waited longest, which becomes group.first. A
// simdgroup whose lanes wait at different places has diverged; hardware, too, runs one side after the other until
// they meet again.
static uint32_t longest_waiting(Simdgroup &group) {
  uint32_t found = group.waiting;
  if (!group.mixed) return found;
  for (uint32_t rest = group.waiting; rest; rest &= rest - 1) {
    Fiber *fiber = group.fibers[__builtin_ctz(rest)];
    if ((int32_t)(fiber->arrival - group.first->arrival) < 0) group.first = fiber;
  }
  for (uint32_t rest = group.waiting; rest; rest &= rest - 1) {
    const int slot = __builtin_ctz(rest);
    if (!same_wait(group.fibers[slot], group.first)) found &= ~(1u << slot);
  }
  return found;
}

static bool is_matrix_operation(Wait wait) { return wait == Wait::multiply || wait == Wait::flush; }

static void report_missing_lanes(Worker &w, const Simdgroup &group, uint32_t released) {
  const Fiber &first = *group.first;
  const int came = __builtin_popcount(released), alive = __builtin_popcount(group.alive);
  if (is_matrix_operation(first.wait)) {
    if (released != group.alive)
      report_wait(DEADLOCK, first,
                  "%d of the simdgroup's %d lanes reach this simdgroup_matrix operation; the others never do", came,
                  alive);
    else
      report_wait(PARTIAL_SIMDGROUP, first, "a simdgroup_matrix operation needs 32 threads; the simdgroup has %d",
                  alive);
    abandon_launch(w);
  }
  if (released == group.alive) return;   // lanes that were never launched or have returned are not missed
  const bool barrier = first.wait == Wait::barrier;
  report_wait(barrier ? DIVERGENT_BARRIER : PARTIAL_SIMDGROUP, first,
              "%d of the simdgroup's %d lanes reach this simd%s; the others are elsewhere and do not take part", came,
              alive, barrier ? "group barrier" : " function");
}

// Lets go lanes that wait together.
static void release(Worker &w, Simdgroup &group) {
  const uint32_t released = longest_waiting(group);
  const Fiber *first = group.first;
  if (released != ~0u) report_missing_lanes(w, group, released);
  group.active = 0;
  for (uint32_t rest = released; rest; rest &= rest - 1)
    group.active |= 1u << group.fibers[__builtin_ctz(rest)]->thread.thread_index_in_simdgroup;
  switch (first->wait) {
    case Wait::gather:
      if (group.active != ~0u) memset(group.gathered, 0xFF, SIM_LANES * first->detail);
      if (first->detail == 4) collect<4>(group, 4);
      else if (first->detail == 2) collect<2>(group, 2);
      else collect<0>(group, first->detail);
      w.counters[SIMD_OPERATIONS]++;
      break;
    case Wait::barrier:
      if (first->detail & SIM_MEM_DEVICE) group.epochs.device++;
      if (first->detail & SIM_MEM_THREADGROUP) group.epochs.threadgroup++;
      w.counters[SIMDGROUP_BARRIERS]++;
      break;
    case Wait::multiply:
      finish_multiply(w, group);
      break;
    case Wait::flush:
      finish_flush(w, group);
      break;
    case Wait::nothing:
      break;
  }
  group.waiting &= ~released;
  if (group.waiting) {   // which of the rest has waited longest is found at the next release
    group.first = group.fibers[__builtin_ctz(group.waiting)];
  } else {
    group.mixed = false;
    group.first = nullptr;
  }
  set_runnable(w, group, released);
}

static void release_threadgroup(Worker &w, unsigned flags) {
  w.at_barrier = 0;
  w.barrier_mixed = false;
  if (flags & SIM_MEM_DEVICE) w.epochs.device++;
  if (flags & SIM_MEM_THREADGROUP) w.epochs.threadgroup++;
  for (int i = 0; i < w.simdgroup_count; i++)
    if (w.simdgroups[i].alive) set_runnable(w, w.simdgroups[i], w.simdgroups[i].alive);
}

// The next lane of the simdgroup after `slot` in its order, else one of another simdgroup.
static Fiber *next_runnable(Worker &w, Simdgroup *group, int slot) {
  if (!w.runnable_simdgroups) return nullptr;
  if (!group->runnable) {
    const uint32_t later = w.runnable_simdgroups & (~0u << group->index);
    group = &w.simdgroups[__builtin_ctz(later ? later : w.runnable_simdgroups)];
    slot = -1;
  }
  const uint32_t later = slot < 31 ? group->runnable & (~0u << (slot + 1)) : 0;
  return group->fibers[__builtin_ctz(later ? later : group->runnable)];
}

// As above; when everybody waits, a simdgroup goes on with the lanes that have come.
static Fiber *somebody(Worker &w, Fiber *fiber) {
  if (Fiber *next = next_runnable(w, fiber->simdgroup, fiber->slot)) return next;
  for (int i = 0; i < w.simdgroup_count; i++)
    if (w.simdgroups[i].waiting) {
      release(w, w.simdgroups[i]);
      return next_runnable(w, &w.simdgroups[i], -1);
    }
  report_wait(DEADLOCK, *fiber, "every thread waits, and nothing can let one go");
  abandon_launch(w);
}

void wait_for_simdgroup(Wait wait, uint32_t detail, const void *site) {
  Worker &w = *worker;
  Fiber *fiber = w.current;
  Simdgroup &group = *fiber->simdgroup;
  fiber->wait = wait;
  fiber->detail = detail;
  fiber->site = site;
  fiber->arrival = group.arrivals++;
  if (!group.waiting) group.first = fiber;
  else if (!same_wait(fiber, group.first)) group.mixed = true;
  group.waiting |= 1u << fiber->slot;
  clear_runnable(w, fiber);
  if (group.waiting == group.alive) {
    release(w, group);
    if (group.runnable >> fiber->slot & 1) return;
  }
  go_to(w, somebody(w, fiber));
}

// The kernel has returned for this thread.
static void leave() {
  Worker &w = *worker;
  Fiber *fiber = w.current;
  Simdgroup &group = *fiber->simdgroup;
  clear_runnable(w, fiber);
  group.alive &= ~(1u << fiber->slot);
  w.alive--;
  if (!w.alive) switch_stack(&fiber->stack_pointer, w.main_stack);
  if (group.waiting && group.waiting == group.alive) release(w, group);
  if (w.at_barrier && w.at_barrier == w.alive) {
    report(DIVERGENT_BARRIER, w.barrier_site,
           "%d of the threadgroup's %d threads wait at this barrier; the others have returned", w.at_barrier,
           w.threads);
    release_threadgroup(w, SIM_MEM_DEVICE | SIM_MEM_THREADGROUP);
  }
  Fiber *next = somebody(w, fiber);
  w.current = next;
  switch_stack(&fiber->stack_pointer, next->stack_pointer);
}

static void fiber_main() {
  worker->launch->kernel->run(&worker->current->thread);
  leave();
  __builtin_unreachable();
}

static uint32_t next_random(Worker &w) {   // xorshift32
  w.random ^= w.random << 13;
  w.random ^= w.random >> 17;
  return w.random ^= w.random << 5;
}

static void set_up_fiber(Worker &w, Simdgroup &group, int slot, int lane) {
  const SimThreadgroup &all = w.threadgroup;
  const unsigned index = group.index * SIM_LANES + lane;
  Fiber &fiber = w.fibers[index];
  group.fibers[slot] = &fiber;
  fiber.simdgroup = &group;
  fiber.slot = slot;
  fiber.wait = Wait::nothing;
  fiber.site = nullptr;
  SimThread &thread = fiber.thread;
  thread.threadgroup = &all;
  const unsigned *size = all.threads_per_threadgroup;
  const unsigned position[3] = {index % size[0], index / size[0] % size[1], index / size[0] / size[1]};
  for (int i = 0; i < 3; i++) {
    thread.thread_position_in_threadgroup[i] = position[i];
    thread.thread_position_in_grid[i] =
        all.threadgroup_position_in_grid[i] * all.dispatch_threads_per_threadgroup[i] + position[i];
  }
  thread.thread_index_in_threadgroup = index;
  thread.thread_index_in_simdgroup = lane;
  thread.simdgroup_index_in_threadgroup = group.index;
  const unsigned row = (lane >> 4 & 1) * 4 + (lane >> 1 & 3), column = (lane >> 3 & 1) * 4 + (lane & 1) * 2;
  thread.element = 8 * row + column;
  thread.pending = 0;
  thread.queue = &group.queue;
  thread.counters = w.counters;
  fiber.stack = (uintptr_t)w.stacks + index * worker_memory.stack_stride;
  const unsigned stagger = index * 320 % 4096;   // starts of stacks are spread over a page's cache lines
  fiber.stack_pointer = fresh_stack((char *)fiber.stack + worker_memory.stack_stride - stagger, fiber_main);
}

static void set_up_simdgroup(Worker &w, int index, int lanes) {
  Simdgroup &group = w.simdgroups[index];
  group.index = index;
  group.alive = group.runnable = lanes == SIM_LANES ? ~0u : (1u << lanes) - 1;
  group.waiting = 0;
  group.mixed = false;
  group.first = nullptr;
  group.epochs = {};
  w.runnable_simdgroups |= 1u << index;
  int order[SIM_LANES];
  for (int i = 0; i < lanes; i++) order[i] = i;
  if (w.launch->seed)
    for (int i = lanes - 1; i > 0; i--) {
      const int other = next_random(w) % (i + 1), lane = order[i];
      order[i] = order[other];
      order[other] = lane;
    }
  for (int slot = 0; slot < lanes; slot++) set_up_fiber(w, group, slot, order[slot]);
}

void run_threadgroup(Worker &w, uint32_t index) {
  const Launch &launch = *w.launch;
  SimThreadgroup &all = w.threadgroup;
  w.threadgroup_index = index;
  w.threads = 1;
  for (int i = 0; i < 3; i++) {
    const unsigned position = index % all.threadgroups_per_grid[i];
    const unsigned left = launch.threads_per_grid[i] - position * launch.threads_per_threadgroup[i];
    index /= all.threadgroups_per_grid[i];
    all.threadgroup_position_in_grid[i] = position;
    all.threads_per_threadgroup[i] =
        left < launch.threads_per_threadgroup[i] ? left : launch.threads_per_threadgroup[i];
    w.threads *= all.threads_per_threadgroup[i];
  }
  w.alive = w.threads;
  w.simdgroup_count = (w.threads + SIM_LANES - 1) / SIM_LANES;
  all.simdgroups_per_threadgroup = w.simdgroup_count;
  all.quadgroups_per_threadgroup = (w.threads + 3) / 4;
  w.at_barrier = 0;
  w.barrier_mixed = false;
  w.epochs = {};
  w.runnable_simdgroups = 0;
  w.random = (launch.seed * 2654435761u ^ w.threadgroup_index * 40503u) | 1;
  for (int i = 0; i < w.simdgroup_count; i++) {
    const int left = w.threads - i * SIM_LANES;
    set_up_simdgroup(w, i, left < SIM_LANES ? left : SIM_LANES);
  }
  w.current = w.simdgroups[launch.seed ? next_random(w) % w.simdgroup_count : 0].fibers[0];
  switch_stack(&w.main_stack, w.current->stack_pointer);
  w.current = nullptr;
}

}  // namespace sim

using namespace sim;

extern "C" {

SimThread *sim_thread(void) { return &worker->current->thread; }

void sim_threadgroup_barrier(unsigned flags) {
  Worker &w = *worker;
  Fiber *fiber = w.current;
  const void *site = __builtin_return_address(0);
  if (fiber->thread.pending) wait_for_simdgroup(Wait::flush, 0, site);
  fiber->site = site;
  if (!w.at_barrier++) w.barrier_site = site;
  else if (w.barrier_site != site && !w.barrier_mixed) {
    w.barrier_mixed = true;
    report_both(DIVERGENT_BARRIER, site, {w.barrier_site, NOBODY, NOBODY},
                "threads of one threadgroup meet at different barriers");
  }
  if (w.at_barrier < w.alive) {
    clear_runnable(w, fiber);
    go_to(w, somebody(w, fiber));
    return;
  }
  if (w.alive < w.threads)
    report(DIVERGENT_BARRIER, site,
           "%d of the threadgroup's %d threads reach this barrier; the others have returned", w.alive, w.threads);
  w.counters[THREADGROUP_BARRIERS]++;
  release_threadgroup(w, flags);
}

void sim_simdgroup_barrier(unsigned flags) {
  const void *site = __builtin_return_address(0);
  if (worker->current->thread.pending) wait_for_simdgroup(Wait::flush, 0, site);
  wait_for_simdgroup(Wait::barrier, flags & (SIM_MEM_DEVICE | SIM_MEM_THREADGROUP), site);
}

const void *sim_gather(const void *value, unsigned bytes, unsigned *active) {
  const void *site = __builtin_return_address(0);
  Fiber *fiber = worker->current;
  if (fiber->thread.pending) wait_for_simdgroup(Wait::flush, 0, site);
  Simdgroup &group = *fiber->simdgroup;
  memcpy(group.given[fiber->thread.thread_index_in_simdgroup], value, bytes);
  wait_for_simdgroup(Wait::gather, bytes, site);
  *active = group.active;
  return group.gathered;
}
}
