// The workers that share a launch's threadgroups: the calling thread, and helpers when there is enough to do.

#include <pthread.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "memory.h"
#include "worker.h"

namespace sim {

constexpr int64_t WORTH_A_HELPER = 200000;   // ns of work left; starting a thread takes a good part of that

struct Pool {
  Launch *launch;
  const Grid *grid;
  int64_t begun, ends;                // ns; 0: no limit
  uint32_t next;                      // atomic: ordinal of the next threadgroup to run
  bool stop;                          // atomic
  bool helped;
  // Under `watch`:
  int count, running;                 // threads, the calling one included
  pthread_t threads[MAX_WORKERS];
};

static pthread_mutex_t watch = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static Pool *current;                 // that runs, for the watchdog
static pid_t watchdog_process;        // a forked process has no watchdog

static int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}

// ---- The order of threadgroups --------------------------------------------------------------------------------

static uint32_t common_divisor(uint32_t a, uint32_t b) { return b ? common_divisor(b, a % b) : a; }

uint32_t threadgroup_at(const Launch &launch, uint32_t count, uint32_t ordinal) {
  if (launch.seed < 2) return launch.seed ? count - 1 - ordinal : ordinal;
  uint32_t step = launch.seed * 2654435761u % count;
  while (common_divisor(step, count) != 1) step++;   // so that every threadgroup has its turn
  const uint32_t index = (uint32_t)((uint64_t)ordinal * step % count);
  return launch.seed % 2 ? count - 1 - index : index;
}

// ---- A worker -------------------------------------------------------------------------------------------------

// Denormal floats are zero while a launch asks for it.
struct FlushToZero {
#if defined(__x86_64__)
  unsigned saved = __builtin_ia32_stmxcsr();
  explicit FlushToZero(bool on) { __builtin_ia32_ldmxcsr(on ? saved | 0x8040 : saved & ~0x8040u); }
  ~FlushToZero() { __builtin_ia32_ldmxcsr(saved); }
#else
  uint64_t saved;
  explicit FlushToZero(bool on) {
    asm volatile("mrs %0, fpcr" : "=r"(saved));
    const uint64_t wanted = on ? saved | 1u << 24 : saved & ~(uint64_t)(1u << 24);
    asm volatile("msr fpcr, %0" : : "r"(wanted));
  }
  ~FlushToZero() { asm volatile("msr fpcr, %0" : : "r"(saved)); }
#endif
};

static void prepare(Worker &w, const Pool &pool) {
  Launch &launch = *pool.launch;
  w.launch = &launch;
  w.checked = launch.library->checked;
  w.shared = pool.helped;
  w.abandoned = w.reporting = false;
  w.current = nullptr;
  w.first_stamp = pool.grid->first_stamp;
  w.threadgroup_count = pool.grid->count;
  w.image = sim_image_base((const void *)launch.kernel->run);
  w.harmless_page = ~(uintptr_t)0;
  w.accumulator_count = w.matrix_count = 0;
  memset(w.counters, 0, sizeof w.counters);
  SimThreadgroup &all = w.threadgroup;
  for (int i = 0; i < SIM_BUFFERS; i++)
    all.buffers[i] = launch.buffers[i] ? launch.buffers[i] : device_memory.unbound(i);
  uint32_t threads = 1;
  for (int i = 0; i < 3; i++) {
    all.dispatch_threads_per_threadgroup[i] = launch.threads_per_threadgroup[i];
    all.threadgroups_per_grid[i] = pool.grid->threadgroups[i];
    all.threads_per_grid[i] = launch.threads_per_grid[i];
    threads *= launch.threads_per_threadgroup[i];
  }
  all.dispatch_simdgroups_per_threadgroup = (threads + SIM_LANES - 1) / SIM_LANES;
  all.sum_order = launch.sum_order % SIM_LANES;
}

static void start_helpers(Pool &pool);

static bool is_worth_helpers(const Pool &pool) {
  const uint32_t done = pool.next < pool.grid->count ? pool.next : pool.grid->count;
  if (pool.helped || pool.launch->workers < 2 || done == pool.grid->count) return false;
  if (pool.launch->at_once) return true;
  return done && (now() - pool.begun) / done * (pool.grid->count - done) > WORTH_A_HELPER;
}

static void run_threadgroups(Worker &w, Pool &pool, bool may_start_helpers) {
  const Grid &grid = *pool.grid;
  for (;;) {
    if (may_start_helpers && is_worth_helpers(pool)) {
      pool.helped = w.shared = true;
      start_helpers(pool);
    }
    const uint32_t ordinal = __atomic_fetch_add(&pool.next, 1, __ATOMIC_RELAXED);
    if (ordinal >= grid.count || __atomic_load_n(&pool.stop, __ATOMIC_RELAXED)) return;
    w.stamp = grid.first_stamp + ordinal;
    begin_threadgroup_memory(w);
    run_threadgroup(w, threadgroup_at(*pool.launch, grid.count, ordinal));
    w.counters[THREADGROUPS]++;
    if (w.abandoned) return;
  }
}

static void add_results(const Worker &w, Pool &pool) {
  Launch &launch = *pool.launch;
  for (int i = 0; i < COUNTERS; i++) {
    if (i != THREADGROUP_MEMORY_BYTES) launch.counters[i] += w.counters[i];
    else if (launch.counters[i] < w.counters[i]) launch.counters[i] = w.counters[i];
  }
  if (w.accumulator_count) launch.accumulators = (uint32_t)w.accumulator_count;
  if (w.matrix_count) launch.matrices = (uint32_t)w.matrix_count;
}

static void work(Pool &pool, bool may_start_helpers) {
  if (Worker *w = acquire_worker()) {
    stack_t before, own = {};
    own.ss_sp = w->signal_stack;
    own.ss_size = sizeof w->signal_stack;
    sigaltstack(&own, &before);
    {
      FlushToZero denormals(pool.launch->flush_to_zero);
      prepare(*w, pool);
      worker = w;
      w->armed = true;
      if (!sigsetjmp(w->escape, 1)) run_threadgroups(*w, pool, may_start_helpers);
      w->armed = false;
      w->current = nullptr;
      worker = nullptr;
    }
    sigaltstack(&before, nullptr);
    pthread_mutex_lock(&watch);
    add_results(*w, pool);
    pthread_mutex_unlock(&watch);
    if (w->abandoned) __atomic_store_n(&pool.stop, true, __ATOMIC_RELAXED);
    release_worker(w);
  }
  pthread_mutex_lock(&watch);
  pool.running--;
  pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&watch);
}

static void *help(void *pool) {
  work(*(Pool *)pool, false);
  return nullptr;
}

static void start_helpers(Pool &pool) {
  uint32_t wanted = pool.launch->workers < MAX_WORKERS ? pool.launch->workers : MAX_WORKERS;
  const uint32_t left = pool.grid->count - pool.next + 1;
  wanted = wanted < left ? wanted : left;
  pthread_mutex_lock(&watch);
  while ((uint32_t)pool.count < wanted && !pthread_create(&pool.threads[pool.count], nullptr, help, &pool)) {
    pool.count++;
    pool.running++;
  }
  pthread_mutex_unlock(&watch);
}

// ---- The watchdog -----------------------------------------------------------------------------------------------

// Looks once a second whether the time of the running launch is up, and stops its threads then.
static void *guard(void *) {
  pthread_mutex_lock(&watch);
  for (;;) {
    while (!current) pthread_cond_wait(&changed, &watch);
    pthread_mutex_unlock(&watch);
    usleep(1000000);
    pthread_mutex_lock(&watch);
    if (!current || !current->ends || now() < current->ends) continue;
    __atomic_store_n(&current->stop, true, __ATOMIC_RELAXED);
    for (int i = 0; i < current->count; i++) pthread_kill(current->threads[i], TIME_IS_UP);
  }
}

static void start_watchdog() {
  if (watchdog_process == getpid()) return;
  pthread_t thread;
  if (!pthread_create(&thread, nullptr, guard, nullptr)) watchdog_process = getpid();
}

void run_workers(Launch &launch, const Grid &grid) {
  Pool pool = {};
  pool.launch = &launch;
  pool.grid = &grid;
  pool.begun = now();
  pool.ends = launch.time_limit ? pool.begun + launch.time_limit * 1000000000ll : 0;
  pool.count = pool.running = 1;
  pool.threads[0] = pthread_self();
  if (launch.time_limit) start_watchdog();
  pthread_mutex_lock(&watch);
  current = &pool;
  if (launch.time_limit) pthread_cond_broadcast(&changed);
  pthread_mutex_unlock(&watch);
  work(pool, true);
  pthread_mutex_lock(&watch);
  while (pool.running) pthread_cond_wait(&changed, &watch);
  current = nullptr;
  pthread_mutex_unlock(&watch);
  for (int i = 1; i < pool.count; i++) pthread_join(pool.threads[i], nullptr);
}

}  // namespace sim
