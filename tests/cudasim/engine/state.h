// A cluster of blocks that runs: its threads are fibers, which run until they wait for others. There is one at a time.
#pragma once

#include <setjmp.h>
#include <stddef.h>
#include <stdint.h>

#include <deque>
#include <map>
#include <memory>
#include <vector>

#include "host.h"

namespace cudasim {

constexpr u32 kMostThreads = 1024, kMostBlocks = 16, kWarpgroup = 128, kNamedBarriers = 16;
constexpr u32 kArenaBytes = 256 << 10;  // of a block's shared memory: more than any GPU has
constexpr u32 kRankShift = 24;          // where an address of shared memory names a block of the cluster, plus one
constexpr unsigned char kPoison = 0xFF;  // what nothing has written: NaN in every type

struct Block;
struct Fiber;

struct Warp {
  Block *block;
  u32 index;            // in the cluster
  u32 runnable, here;   // bits of slots: those that may run; those that came to the operation
  Operation operation;
  u32 bytes;
  u32 turn;             // operations so far: slots are used by turns, as a lane may be one ahead
  Fiber *fibers[kLanes];  // in the order in which they run
  Slot slots[2][kLanes];
};

struct Copy {
  char *to;
  const void *from;  // null: zeros
  u32 bytes;
};

struct Issued {
  Product product;
  u32 sums;   // which of the thread's sums in flight
  u32 group;  // number of its commit
};

// Sums of products that are not done: the registers of a thread.
struct Flying {
  float *registers;
  u32 columns;
};

struct Fiber {
  Thread thread;  // first: what the kernel sees
  void *stack_pointer;
  char *stack;
  Warp *warp;
  Block *block;
  u32 slot, lane, index;  // index: in the block
  bool ended, waited_for_previous;
  Place place;
  const char *waits_for;
  u64 detail;  // of what it waits for
  std::vector<Copy> open;
  std::deque<std::vector<Copy>> copies;
  std::vector<Issued> products;
  std::vector<Flying> flying;
  bool products_begun;
  u32 commits;
  std::vector<u32> unfenced;  // barriers that it has initialised
};

struct Array {
  const void *key;
  u32 offset, bytes;
};

struct ThreadBarrier {
  u32 arrived, threads;
  std::vector<Fiber *> waiting;
};

struct MemoryBarrier {
  u32 arrivals, left;  // to come in a phase, and still to come in this one
  long bytes;          // announced and not yet there
  u32 parity;          // of the phase that runs
  bool fenced;
  std::vector<Fiber *> waiting;
};

struct Warpgroup {
  std::vector<Fiber *> here;  // wait for products
  Place place;
  u32 pending;
  std::vector<std::unique_ptr<float[]>> sums;  // 64 rows of columns, for each of Fiber::flying
};

struct Block {
  Index index;
  u32 rank, alive;
  std::vector<Fiber *> fibers;
  std::vector<Warp> warps;
  char *arena;
  u32 arrays_end, dynamic_start;
  std::vector<Array> arrays;
  ThreadBarrier barriers[kNamedBarriers];
  std::map<u32, MemoryBarrier> memory_barriers;
  std::vector<Warpgroup> warpgroups;
};

// What the copy engine has been asked for: a box of a matrix, or bytes one behind the other.
struct Fetch {
  Block *block;
  u32 to, bytes, barrier;
  Place place;
  const char *run;  // null: a box
  TensorMap map;
  int column, row;
};

struct Cluster {
  Launch *launch;
  bool first;  // of the launch: nothing may touch the device's memory before wait_for_previous
  bool gate_closed;
  bool failed;
  u32 alive;
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<u64> runnable;  // bits of warps
  std::deque<Fetch> fetches;
  std::deque<Warpgroup *> waiting_for_products;  // all their threads do
  ThreadBarrier barrier;
  u32 barrier_phase;
  Fiber *current;
  void *main_stack;
  sigjmp_buf escape;
  bool armed;
  u32 random;
};
extern Cluster cluster;

// The place of a call into the engine. Kernels keep frame pointers.
#define CUDASIM_HERE                                                                        \
  ([](void **frame) -> Place {                                                              \
    void **const above = (void **)frame[0];                                                 \
    return {(u64)frame[1], above && above[0] ? (u64)above[1] : 0};                          \
  }((void **)__builtin_frame_address(0)))

// scheduler.cpp
void run_cluster(Index first_block);
// The current thread waits until `wake`; what for is part of a deadlock's report.
void wait_here(Place, const char *what, u64 detail = 0);
void wake(Fiber *);
// Having let others go on, the current thread lets them run first, unless threads run in their order.
void give_way();
[[noreturn]] void fail(const char *kind, Place, const char *format, ...) __attribute__((format(printf, 3, 4)));
[[noreturn]] void fail_from_signal(const char *kind, u64 instruction, const char *message);

// shared.cpp
void fresh_arena(Block &);
void check_arena(Block &);
char *shared_pointer(u32 address, u32 bytes, u32 alignment, Place);

// copies.cpp
bool land_one_fetch();
void finish_copies_of(Fiber &);

// products.cpp
void perform(Operation, Slot *, Place);
bool finish_products_of_one();

// memory.cpp
void close_gate();
void open_gate();
bool describe_access(u64 address, char *text, size_t bytes);
void check_fillings();

}  // namespace cudasim
