// Copies to shared memory that run beside the threads: their own, and what the copy engine fetches. Where a copy
// goes there is poison until it lands, and it lands as late as it may.

#include <string.h>

#include <algorithm>

#include "state.h"

namespace cudasim {

constexpr u32 kLineBytes = 128, kSwizzleBytes = 16;

static MemoryBarrier &barrier_at(Block &block, u32 address, Place place) {
  const auto found = block.memory_barriers.find(address);
  if (found == block.memory_barriers.end())
    fail("barrier", place, "byte %u of shared memory is no initialised barrier", address);
  return found->second;
}

static bool end_phase_if_over(MemoryBarrier &barrier) {
  if (barrier.left || barrier.bytes) return false;
  barrier.parity ^= 1;
  barrier.left = barrier.arrivals;
  for (Fiber *fiber : barrier.waiting) wake(fiber);
  barrier.waiting.clear();
  return true;
}

// Calls act(to, from, before, after) for all pieces of a box: of the 16 bytes, so many before and after are not the
// matrix's; from null: none is.
template <typename Act>
static void for_each_piece(const Fetch &fetch, Act act) {
  const TensorMap &map = fetch.map;
  const int per_piece = int(kSwizzleBytes / map.element_bytes);
  for (u32 i = 0; i < map.box_rows; i++)
    for (u32 piece = 0; piece < kLineBytes / kSwizzleBytes; piece++) {
      const u32 line = fetch.to + i * kLineBytes;
      char *to = fetch.block->arena + line + ((piece ^ line / kLineBytes % 8) * kSwizzleBytes);
      const int row = fetch.row + int(i), column = fetch.column + int(piece) * per_piece;
      const bool row_there = row >= 0 && row < int(map.rows);
      int before = column < 0 ? -column : 0, after = column + per_piece - int(map.columns);
      if (!row_there || before >= per_piece || after >= per_piece) {
        act(to, nullptr, 0, 0);
        continue;
      }
      const char *from = (const char *)map.address + map.row_bytes * u64(row) + long(column) * map.element_bytes;
      act(to, from, u32(before) * map.element_bytes, u32(after > 0 ? after : 0) * map.element_bytes);
    }
}

static void land(const Fetch &fetch) {
  if (fetch.run) memcpy(fetch.block->arena + fetch.to, fetch.run, fetch.bytes);
  else
    for_each_piece(fetch, [](char *to, const char *from, u32 before, u32 after) {
      memset(to, 0, kSwizzleBytes);
      if (from) memcpy(to + before, from + before, kSwizzleBytes - before - after);
    });
  MemoryBarrier &barrier = barrier_at(*fetch.block, fetch.barrier, fetch.place);
  barrier.bytes -= long(fetch.bytes);
  end_phase_if_over(barrier);
}

static void send(const Fetch &fetch, u32 alignment) {
  if (!barrier_at(*fetch.block, fetch.barrier, fetch.place).fenced)
    fail("barrier", fetch.place, "barrier %u is given to the copy engine without a fence behind its initialisation",
         fetch.barrier);
  memset(shared_pointer(fetch.to, fetch.bytes, alignment, fetch.place), kPoison, fetch.bytes);
  cluster.fetches.push_back(fetch);
}

static bool is_waited_for(const Fetch &fetch) {
  return !barrier_at(*fetch.block, fetch.barrier, fetch.place).waiting.empty();
}

// In the order of their issue, or in the reverse order; but what nobody waits for comes last, when memory may be in
// use for something else.
bool land_one_fetch() {
  auto &fetches = cluster.fetches;
  if (fetches.empty()) return false;
  auto next = std::find_if(fetches.begin(), fetches.end(), is_waited_for);
  if (cluster.launch->order == 1) {
    const auto found = std::find_if(fetches.rbegin(), fetches.rend(), is_waited_for);
    next = found == fetches.rend() ? fetches.end() - 1 : found.base() - 1;
  } else if (next == fetches.end()) {
    next = fetches.begin();
  }
  const Fetch fetch = *next;
  fetches.erase(next);
  land(fetch);
  return true;
}

static void land(const std::vector<Copy> &group) {
  for (const Copy &copy : group)
    if (copy.from) memcpy(copy.to, copy.from, copy.bytes);
    else memset(copy.to, 0, copy.bytes);
}

void finish_copies_of(Fiber &fiber) {
  bool some = !fiber.open.empty();
  for (const auto &group : fiber.copies) some |= !group.empty();
  if (some) fail("unfinished", {}, "a thread ends while copies of its own are on their way");
}

}  // namespace cudasim

using namespace cudasim;

extern "C" {

void cudasim_copy(u32 to, const void *from, u32 bytes, u32 there) {
  const Place place = CUDASIM_HERE;
  if (there != 0 && there != bytes) fail("copy", place, "a copy of %u of %u bytes", there, bytes);
  if (there && (u64)from % bytes) fail("misaligned", place, "a copy of %u bytes from address %p", bytes, from);
  char *pointer = shared_pointer(to, bytes, bytes, place);
  memset(pointer, kPoison, bytes);
  cluster.current->open.push_back({pointer, there ? from : nullptr, bytes});
}

void cudasim_end_copies(void) {
  Fiber &fiber = *cluster.current;
  fiber.copies.push_back(std::move(fiber.open));
  fiber.open.clear();
}

void cudasim_wait_copies(u32 running) {
  auto &copies = cluster.current->copies;
  for (; copies.size() > running; copies.pop_front()) land(copies.front());
}

void cudasim_init_barrier(u32 address, u32 arrivals) {
  shared_pointer(address, 8, 8, CUDASIM_HERE);
  cluster.current->block->memory_barriers[address] = {arrivals, arrivals, 0, 0, false, {}};
  cluster.current->unfenced.push_back(address);
}

void cudasim_fence_barrier_init(void) {
  Fiber &fiber = *cluster.current;
  for (u32 address : fiber.unfenced) fiber.block->memory_barriers[address].fenced = true;
  fiber.unfenced.clear();
}

void cudasim_arrive(u32 address, u32 announced_bytes) {
  const Place place = CUDASIM_HERE;
  MemoryBarrier &barrier = barrier_at(*cluster.current->block, address, place);
  if (!barrier.left)
    fail("barrier", place, "more than the %u threads that it expects arrive at barrier %u", barrier.arrivals, address);
  barrier.bytes += announced_bytes;
  barrier.left--;
  if (end_phase_if_over(barrier)) give_way();
}

void cudasim_wait(u32 address, u32 parity) {
  const Place place = CUDASIM_HERE;
  MemoryBarrier &barrier = barrier_at(*cluster.current->block, address, place);
  if (parity > 1) fail("barrier", place, "phases have parity 0 or 1, not %u", parity);
  if (barrier.parity != parity) return;
  barrier.waiting.push_back(cluster.current);
  wait_here(place, "barrier in shared memory", address);
}

void cudasim_fetch_bytes(u32 to, const void *from, u32 bytes, u32 barrier) {
  const Place place = CUDASIM_HERE;
  if ((u64)from % 16 || bytes % 16)
    fail("misaligned", place, "%u bytes from address %p: no multiples of 16", bytes, from);
  send({cluster.current->block, to, bytes, barrier, place, (const char *)from, {}, 0, 0}, 16);
}

void cudasim_fetch_box(u32 to, const void *map, u32 column, u32 row, u32 barrier) {
  const Place place = CUDASIM_HERE;
  Fetch fetch = {cluster.current->block, to, 0, barrier, place, nullptr, {}, int(column), int(row)};
  if ((u64)map % 64) fail("misaligned", place, "a tensor map at address %p", map);
  memcpy(&fetch.map, map, sizeof fetch.map);
  const TensorMap &found = fetch.map;
  if (found.mark != kTensorMapMark) fail("tensor map", place, "there is no tensor map where one is expected");
  if (found.box_columns * found.element_bytes != kLineBytes)
    fail("tensor map", place, "rows of a box have %u bytes; the simulator knows those of 128",
         found.box_columns * found.element_bytes);
  fetch.bytes = found.box_rows * kLineBytes;
  send(fetch, kLineBytes);
}

}  // extern "C"
