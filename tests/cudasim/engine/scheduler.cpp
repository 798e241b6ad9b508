// Which thread runs: warps' operations, barriers of blocks and clusters, and what happens when everyone waits.

#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include "../../metalsim/engine/fiber.h"
#include "state.h"

namespace cudasim {

constexpr size_t kStackBytes = 128 << 10;

Cluster cluster;
static std::vector<std::unique_ptr<Fiber>> fibers;

static void set_runnable(Warp &warp, u32 slots) {
  warp.runnable |= slots;
  cluster.runnable[warp.index / 64] |= 1ull << warp.index % 64;
}

static void clear_runnable(Fiber &fiber) {
  Warp &warp = *fiber.warp;
  warp.runnable &= ~(1u << fiber.slot);
  if (!warp.runnable) cluster.runnable[warp.index / 64] &= ~(1ull << warp.index % 64);
}

void wake(Fiber *fiber) {
  fiber->waits_for = nullptr;
  set_runnable(*fiber->warp, 1u << fiber->slot);
}

static void leave_cluster() {
  void *nowhere;
  sim::switch_stack(&nowhere, cluster.main_stack);
  __builtin_unreachable();
}

static void fill_report(const char *kind, Place place, const Fiber *fiber) {
  Report &report = cluster.launch->report;
  snprintf(report.kind, sizeof report.kind, "%s", kind);
  report.place = place;
  if (fiber) report.block = fiber->thread.block, report.thread = fiber->index;
  cluster.failed = true;
}

void fail(const char *kind, Place place, const char *format, ...) {
  fill_report(kind, place, cluster.current);
  va_list values;
  va_start(values, format);
  vsnprintf(cluster.launch->report.message, sizeof cluster.launch->report.message, format, values);
  va_end(values);
  if (cluster.current) leave_cluster();
  siglongjmp(cluster.escape, 1);
}

void fail_from_signal(const char *kind, u64 instruction, const char *message) {
  fill_report(kind, {instruction, 0}, cluster.current);
  snprintf(cluster.launch->report.message, sizeof cluster.launch->report.message, "%s", message);
  siglongjmp(cluster.escape, 1);
}

// Everyone waits, and nothing will come.
[[noreturn]] static void fail_deadlocked() {
  Report &report = cluster.launch->report;
  for (auto &block : cluster.blocks)
    for (Fiber *fiber : block->fibers) {
      if (fiber->ended) continue;
      const char *what = fiber->waits_for ? fiber->waits_for : "?";
      Waiting *last = report.wait_count ? &report.waits[report.wait_count - 1] : nullptr;
      if (last && last->place.inner == fiber->place.inner && last->place.outer == fiber->place.outer &&
          last->block == block->rank && !strncmp(last->what, what, strlen(what))) {
        last->count++;
        continue;
      }
      if (report.wait_count == kMostWaits) continue;
      Waiting &waiting = report.waits[report.wait_count++];
      waiting = {fiber->place, fiber->index, 1, block->rank, {}};
      const auto barrier = block->memory_barriers.find(u32(fiber->detail));
      if (barrier != block->memory_barriers.end() && strstr(what, "shared memory"))
        snprintf(waiting.what, sizeof waiting.what, "%s %u: %u arrivals and %ld bytes are to come", what,
                 barrier->first, barrier->second.left, barrier->second.bytes);
      else
        snprintf(waiting.what, sizeof waiting.what, "%s %llu", what, fiber->detail);
    }
  const u32 threads = cluster.launch->threads * u32(cluster.blocks.size());
  fail("deadlock", {}, "%u of %u threads wait, %u have ended, and nothing lets one go", cluster.alive, threads,
       threads - cluster.alive);
}

// The first runnable thread of the warps behind this one; null if there is none but perhaps in itself.
static Fiber *runnable_behind(const Warp *warp) {
  const u32 words = u32(cluster.runnable.size()), word = warp->index / 64;
  const u64 own = 1ull << warp->index % 64;
  for (u32 i = 0; i <= words; i++) {
    const u32 at = (word + i) % words;
    u64 bits = cluster.runnable[at];
    if (at == word) bits &= ~own;
    if (i == 0) bits &= ~(own - 1);
    if (!bits) continue;
    const u32 index = at * 64 + u32(__builtin_ctzll(bits)), warps = u32(cluster.blocks[0]->warps.size());
    const Warp &other = cluster.blocks[index / warps]->warps[index % warps];
    return other.fibers[__builtin_ctz(other.runnable)];
  }
  return nullptr;
}

// The next thread of the warp after `slot` in its order, else of another warp.
static Fiber *next_runnable(const Warp *warp, u32 slot) {
  const u32 later = slot < 31 ? warp->runnable & (~0u << (slot + 1)) : 0;
  if (const u32 found = later ? later : warp->runnable) return warp->fibers[__builtin_ctz(found)];
  return runnable_behind(warp);
}

static Fiber *somebody(const Fiber *fiber) {
  while (true) {
    if (Fiber *next = next_runnable(fiber->warp, fiber->slot)) return next;
    if (cluster.gate_closed) {
      open_gate();
      for (auto &block : cluster.blocks)
        for (Fiber *waiting : block->fibers)
          if (!waiting->ended && waiting->waited_for_previous) wake(waiting);
      continue;
    }
    // As late as they can be.
    if (!finish_products_of_one() && !land_one_fetch()) fail_deadlocked();
  }
}

static void go_on(Fiber *fiber) {
  cluster.current = fiber;
  cudasim_thread = &fiber->thread;
}

void wait_here(Place place, const char *what, u64 detail) {
  Fiber *fiber = cluster.current;
  fiber->place = place;
  fiber->waits_for = what;
  fiber->detail = detail;
  clear_runnable(*fiber);
  Fiber *next = somebody(fiber);
  if (next == fiber) return;
  go_on(next);
  sim::switch_stack(&fiber->stack_pointer, next->stack_pointer);
}

void give_way() {
  if (cluster.launch->order == 0) return;
  Fiber *fiber = cluster.current, *next = runnable_behind(fiber->warp);
  if (!next) return;
  go_on(next);
  sim::switch_stack(&fiber->stack_pointer, next->stack_pointer);
}

static void fiber_main() {
  cluster.launch->kernel(cluster.launch->arguments);
  Fiber *fiber = cluster.current;
  finish_copies_of(*fiber);
  if (!fiber->waited_for_previous)
    fail("no wait", {}, "a thread ends without having waited for the kernel before");
  if (!fiber->products.empty()) fail("unfinished", {}, "a thread ends before its products are done");
  fiber->ended = true;
  clear_runnable(*fiber);
  fiber->block->alive--;
  if (!--cluster.alive) leave_cluster();
  Fiber *next = somebody(fiber);
  go_on(next);
  sim::switch_stack(&fiber->stack_pointer, next->stack_pointer);
}

static u32 next_random() {  // xorshift32
  u32 &x = cluster.random;
  x ^= x << 13, x ^= x >> 17, x ^= x << 5;
  return x;
}

// 0: in order; 1: backwards; else shuffled.
static void put_in_order(std::vector<u32> &numbers) {
  const u32 order = cluster.launch->order;
  for (u32 i = 0; i < numbers.size(); i++) numbers[i] = order == 1 ? u32(numbers.size()) - 1 - i : i;
  if (order < 2) return;
  for (u32 i = u32(numbers.size()); i-- > 1;) {
    std::swap(numbers[i], numbers[next_random() % (i + 1)]);
  }
}

static Fiber &fiber_number(u32 number) {
  while (fibers.size() <= number) {
    auto fiber = std::make_unique<Fiber>();
    fiber->stack = (char *)mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(fiber->stack, 4096, PROT_NONE);
    fibers.push_back(std::move(fiber));
  }
  return *fibers[number];
}

static void set_up_block(Block &block, Index index, u32 rank) {
  const Launch &launch = *cluster.launch;
  const u32 warps = launch.threads / kLanes;
  block.index = index;
  block.rank = rank;
  block.alive = launch.threads;
  block.fibers.assign(launch.threads, nullptr);
  block.warps.resize(warps);
  for (ThreadBarrier &barrier : block.barriers) barrier.arrived = 0, barrier.waiting.clear();
  block.memory_barriers.clear();
  block.warpgroups.clear();
  block.warpgroups.resize((launch.threads + kWarpgroup - 1) / kWarpgroup);
  fresh_arena(block);
  std::vector<u32> warp_order(warps), lane_order(kLanes);
  put_in_order(warp_order);
  for (u32 w = 0; w < warps; w++) {
    Warp &warp = block.warps[w];
    warp.block = &block;
    warp.index = rank * warps + w;
    warp.runnable = warp.here = 0;
    put_in_order(lane_order);
    for (u32 slot = 0; slot < kLanes; slot++) {
      const u32 thread = warp_order[w] * kLanes + lane_order[slot];
      Fiber &fiber = fiber_number(rank * launch.threads + thread);
      fiber.thread = {{thread, 0, 0}, index, {launch.threads, 1, 1}, launch.grid};
      fiber.warp = &warp, fiber.block = &block;
      fiber.slot = slot, fiber.lane = lane_order[slot], fiber.index = thread;
      fiber.ended = fiber.waited_for_previous = fiber.products_begun = false;
      fiber.commits = 0;
      fiber.waits_for = nullptr;
      fiber.open.clear(), fiber.copies.clear(), fiber.products.clear(), fiber.flying.clear(), fiber.unfenced.clear();
      // Stacks begin at different places of a page, for the sake of the cache.
      fiber.stack_pointer = sim::fresh_stack(fiber.stack + kStackBytes - thread * 320 % 4096, fiber_main);
      block.fibers[thread] = &fiber;
      warp.fibers[slot] = &fiber;
    }
    set_runnable(warp, ~0u);
  }
}

void run_cluster(Index first_block) {
  const u32 size = cluster.launch->cluster, warps = cluster.launch->threads / kLanes;
  while (cluster.blocks.size() < size) cluster.blocks.push_back(std::make_unique<Block>());
  cluster.blocks.resize(size);
  cluster.runnable.assign((size * warps + 63) / 64, 0);
  cluster.fetches.clear();
  cluster.waiting_for_products.clear();
  cluster.barrier = {};
  cluster.barrier_phase = 0;
  cluster.alive = size * cluster.launch->threads;
  cluster.current = nullptr;
  for (u32 rank = 0; rank < size; rank++)
    set_up_block(*cluster.blocks[rank], {first_block.x + rank, first_block.y, first_block.z}, rank);
  if (cluster.first && !cluster.launch->beside) close_gate();
  const Warp &warp = cluster.blocks[cluster.launch->order == 1 ? size - 1 : 0]->warps[0];
  go_on(warp.fibers[0]);
  sim::switch_stack(&cluster.main_stack, cluster.current->stack_pointer);
  cluster.current = nullptr;
  if (cluster.failed) siglongjmp(cluster.escape, 1);
  if (cluster.gate_closed) open_gate();
  if (!cluster.fetches.empty())
    fail("unfinished", cluster.fetches[0].place, "a box was still on its way when the block ended");
  for (auto &block : cluster.blocks) check_arena(*block);
}

static const char *name_of(Operation operation) {
  static const char *const names[] = {"__syncwarp", "shuffle or vote", "ldmatrix", "ldmatrix.trans",
                                      "stmatrix",   "mma.sync",        "mma.sync"};
  return names[u32(operation)];
}

static void come_to(ThreadBarrier &barrier, u32 threads, Place place, const char *what) {
  if (!barrier.arrived) barrier.threads = threads;
  if (barrier.threads != threads)
    fail("barrier", place, "%u threads are expected at this %s, and others expect %u there", threads, what,
         barrier.threads);
  barrier.arrived++;
}

static bool let_go(ThreadBarrier &barrier) {
  if (barrier.arrived < barrier.threads) return false;
  barrier.arrived = 0;
  for (Fiber *fiber : barrier.waiting) wake(fiber);
  barrier.waiting.clear();
  return true;
}

static ThreadBarrier &block_barrier(u32 id, u32 &threads, Place place) {
  Block &block = *cluster.current->block;
  if (!threads) threads = cluster.launch->threads;
  if (id >= kNamedBarriers || threads % kLanes || threads > cluster.launch->threads)
    fail("barrier", place, "there is no barrier %u for %u threads", id, threads);
  return block.barriers[id];
}

}  // namespace cudasim

using namespace cudasim;

extern "C" {

Thread *cudasim_thread;

const Slot *cudasim_exchange(Operation operation, const void *mine, u32 bytes) {
  const Place place = CUDASIM_HERE;
  Fiber *fiber = cluster.current;
  Warp &warp = *fiber->warp;
  Slot *const slots = warp.slots[warp.turn % 2];
  if (!warp.here) {
    warp.operation = operation;
    warp.bytes = bytes;
  } else if (warp.operation != operation || warp.bytes != bytes) {
    fail("divergent warp", place, "lane %u comes to a %s, others of its warp to a %s", fiber->lane, name_of(operation),
         name_of(warp.operation));
  }
  if (bytes) memcpy(slots[fiber->lane].bytes, mine, bytes);
  warp.here |= 1u << fiber->slot;
  if (warp.here != ~0u) {
    wait_here(place, name_of(operation), warp.here);
    return slots;
  }
  perform(operation, slots, place);
  for (Fiber *other : warp.fibers) other->waits_for = nullptr;
  warp.here = 0;
  warp.turn++;
  set_runnable(warp, ~0u);
  return slots;
}

void cudasim_sync_block(u32 id, u32 threads) {
  const Place place = CUDASIM_HERE;
  ThreadBarrier &barrier = block_barrier(id, threads, place);
  come_to(barrier, threads, place, "barrier of a block");
  if (let_go(barrier)) return;
  barrier.waiting.push_back(cluster.current);
  wait_here(place, "barrier", id);
}

void cudasim_arrive_at_block(u32 id, u32 threads) {
  const Place place = CUDASIM_HERE;
  ThreadBarrier &barrier = block_barrier(id, threads, place);
  come_to(barrier, threads, place, "barrier of a block");
  if (let_go(barrier)) give_way();
}

void cudasim_wait_for_previous(void) {
  Fiber *fiber = cluster.current;
  fiber->waited_for_previous = true;
  if (cluster.gate_closed) wait_here(CUDASIM_HERE, "the kernel before");
}

void cudasim_let_next_begin(void) {
  if (!cluster.current->waited_for_previous)
    fail("no wait", CUDASIM_HERE, "the next kernel may begin, and the one before is not known to have ended");
}

u32 cudasim_cluster_rank(void) { return cluster.current->block->rank; }

void cudasim_arrive_at_cluster(void) {
  const Place place = CUDASIM_HERE;
  cluster.current->detail = cluster.barrier_phase;
  come_to(cluster.barrier, cluster.launch->threads * cluster.launch->cluster, place, "barrier of the cluster");
  if (let_go(cluster.barrier)) cluster.barrier_phase++;
}

void cudasim_wait_for_cluster(void) {
  Fiber *fiber = cluster.current;
  if (fiber->detail != cluster.barrier_phase) return;
  cluster.barrier.waiting.push_back(fiber);
  wait_here(CUDASIM_HERE, "barrier of the cluster", cluster.barrier_phase);
}

}  // extern "C"
