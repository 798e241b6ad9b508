// What compiled kernels ask of the engine. Every kernel includes it, so there are no standard headers.
#pragma once

namespace cudasim {

using u32 = unsigned int;
using u64 = unsigned long long;

struct Index {
  u32 x, y, z;
};

// threadIdx, blockIdx, blockDim and gridDim.
struct Thread {
  Index thread, block, block_size, grid;
};

constexpr int kLanes = 32;
constexpr int kSlotBytes = 48;

// What a lane gives to a warp's operation, and what it gets of it.
struct alignas(16) Slot {
  unsigned char bytes[kSlotBytes];
};

// All lanes of a warp must come to the same one.
enum class Operation : u32 { sync, gather, load, load_transposed, store, multiply_bf16, multiply_f16 };

// A product of a warpgroup, as one of its threads issues it. Operand a lies in registers, if there are any.
struct Product {
  u64 a, b;  // descriptors
  u32 registers[4];
  u32 columns;
  bool bf16, has_registers, adds, along_m, along_n;
};

}  // namespace cudasim

#pragma GCC visibility push(default)
extern "C" {
extern cudasim::Thread *cudasim_thread;  // the one that runs

// The slots of all lanes when each has given its own.
const cudasim::Slot *cudasim_exchange(cudasim::Operation, const void *mine, cudasim::u32 bytes);
// Barrier `id` of the block, for so many of its threads; 0: for all.
void cudasim_sync_block(cudasim::u32 id, cudasim::u32 threads);
void cudasim_arrive_at_block(cudasim::u32 id, cudasim::u32 threads);
void cudasim_wait_for_previous(void);
void cudasim_let_next_begin(void);

// Memory that the threads of a block share: a declared array, by the address of something that is its own; what the
// launch gives beside; addresses as PTX has them.
void *cudasim_shared(const void *key, cudasim::u64 bytes, cudasim::u64 alignment);
void *cudasim_dynamic_shared(cudasim::u64 alignment);
cudasim::u32 cudasim_shared_address(const void *);

cudasim::u32 cudasim_cluster_rank(void);
cudasim::u32 cudasim_peer_address(cudasim::u32 address, cudasim::u32 rank);
void cudasim_store_peer(cudasim::u32 address, const void *from, cudasim::u32 bytes);
void cudasim_arrive_at_cluster(void);
void cudasim_wait_for_cluster(void);

// A thread's own copies to shared memory, and its groups of them.
void cudasim_copy(cudasim::u32 to, const void *from, cudasim::u32 bytes, cudasim::u32 there);
void cudasim_end_copies(void);
void cudasim_wait_copies(cudasim::u32 running);

// Barriers in shared memory, and the copy engine.
void cudasim_init_barrier(cudasim::u32 barrier, cudasim::u32 arrivals);
void cudasim_fence_barrier_init(void);
void cudasim_arrive(cudasim::u32 barrier, cudasim::u32 announced_bytes);
void cudasim_wait(cudasim::u32 barrier, cudasim::u32 parity);
void cudasim_fetch_bytes(cudasim::u32 to, const void *from, cudasim::u32 bytes, cudasim::u32 barrier);
void cudasim_fetch_box(cudasim::u32 to, const void *map, cudasim::u32 column, cudasim::u32 row, cudasim::u32 barrier);

// A warpgroup's products.
void cudasim_begin_products(void);
void cudasim_product(float *sums, const cudasim::Product &);
void cudasim_end_products(void);
void cudasim_wait_products(cudasim::u32 pending);

// What a sanitizer found, and the address of the code that did it.
void cudasim_misaligned(const void *pointer, const void *code);
void cudasim_outside_array(const void *index, const void *code);
}
#pragma GCC visibility pop
