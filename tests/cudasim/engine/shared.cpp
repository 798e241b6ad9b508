// Shared memory of a block: declared arrays from the bottom of an arena, with gaps; what the launch gives at its top.

#include <string.h>
#include <sys/mman.h>

#include "state.h"

namespace cudasim {

constexpr u32 kBottom = 1024, kGap = 64, kGuard = 64 << 10;

static char *new_arena() {
  char *memory = (char *)mmap(nullptr, kArenaBytes + 3 * kGuard, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  memory += kGuard + (-(u64)memory & (kGuard - 1));  // aligned as no swizzle asks for
  mprotect(memory, kArenaBytes, PROT_READ | PROT_WRITE);
  memset(memory, kPoison, kArenaBytes);
  return memory;
}

// Poisons what the last block has used.
void fresh_arena(Block &block) {
  if (!block.arena) {
    block.arena = new_arena();
    block.arrays_end = kBottom;
    block.dynamic_start = kArenaBytes;
  }
  memset(block.arena, kPoison, block.arrays_end);
  memset(block.arena + block.dynamic_start, kPoison, kArenaBytes - block.dynamic_start);
  block.arrays_end = kBottom;
  block.dynamic_start = kArenaBytes;
  block.arrays.clear();
}

static void check_poisoned(const Block &block, u32 from, u32 to, const char *where) {
  for (u32 i = from; i < to; i++)
    if ((unsigned char)block.arena[i] != kPoison)
      fail("out of bounds", {}, "block (%u, %u, %u) has written %u bytes %s", block.index.x, block.index.y,
           block.index.z, i - from, where);
}

void check_arena(Block &block) {
  u32 end = 0;
  for (const Array &array : block.arrays) {
    check_poisoned(block, end, array.offset, "behind an array in shared memory");
    end = array.offset + array.bytes;
  }
  check_poisoned(block, end, block.arrays_end, "behind the last array in shared memory");
  if (block.dynamic_start < kArenaBytes)
    check_poisoned(block, block.dynamic_start + cluster.launch->shared, kArenaBytes,
                   "behind the launch's shared memory");
}

// Where an address of PTX points: into the block's own memory, or another's of the cluster.
char *shared_pointer(u32 address, u32 bytes, u32 alignment, Place place) {
  Block *block = cluster.current->block;
  if (const u32 rank = address >> kRankShift) {
    if (rank > cluster.blocks.size()) fail("out of bounds", place, "the cluster has no block %u", rank - 1);
    block = cluster.blocks[rank - 1].get();
    if (!block->alive) fail("out of bounds", place, "block %u of the cluster has ended", rank - 1);
  }
  const u32 offset = address & ((1u << kRankShift) - 1);
  if (offset % alignment)
    fail("misaligned", place, "byte %u of shared memory is no multiple of %u", offset, alignment);
  const auto lies_in = [&](u32 start, u32 size) { return offset >= start && offset + bytes <= start + size; };
  bool inside = lies_in(block->dynamic_start, cluster.launch->shared);
  for (const Array &array : block->arrays) inside |= lies_in(array.offset, array.bytes);
  if (!inside) fail("out of bounds", place, "bytes %u to %u of shared memory are in no array", offset, offset + bytes);
  return block->arena + offset;
}

}  // namespace cudasim

using namespace cudasim;

extern "C" {

void *cudasim_shared(const void *key, u64 bytes, u64 alignment) {
  Block &block = *cluster.current->block;
  for (const Array &array : block.arrays)
    if (array.key == key) return block.arena + array.offset;
  const u32 align = u32(alignment), offset = (block.arrays_end + kGap + align - 1) / align * align;
  const u64 end = offset + bytes + kGap;
  if (end > block.dynamic_start || end > kArenaBytes - cluster.launch->shared)
    fail("shared memory", CUDASIM_HERE, "%llu bytes more than there are", end + cluster.launch->shared - kArenaBytes);
  block.arrays.push_back({key, offset, u32(bytes)});
  block.arrays_end = u32(end);
  return block.arena + offset;
}

// At an odd multiple of its alignment, and no higher one.
void *cudasim_dynamic_shared(u64 alignment) {
  Block &block = *cluster.current->block;
  const u32 align = u32(alignment), room = kArenaBytes - cluster.launch->shared;
  const u32 start = (room - align) / (2 * align) * (2 * align) + align;
  if (start <= block.arrays_end)
    fail("shared memory", CUDASIM_HERE, "the launch's %u bytes do not fit beside the arrays", cluster.launch->shared);
  block.dynamic_start = start;
  return block.arena + start;
}

u32 cudasim_shared_address(const void *pointer) {
  Block &block = *cluster.current->block;
  const u64 offset = (u64)pointer - (u64)block.arena;
  if (offset > kArenaBytes)
    fail("out of bounds", CUDASIM_HERE, "a pointer that leads to no shared memory is taken for one");
  return u32(offset);
}

u32 cudasim_peer_address(u32 address, u32 rank) { return address | (rank + 1) << kRankShift; }

void cudasim_store_peer(u32 address, const void *from, u32 bytes) {
  memcpy(shared_pointer(address, bytes, bytes, CUDASIM_HERE), from, bytes);
}

}  // extern "C"
