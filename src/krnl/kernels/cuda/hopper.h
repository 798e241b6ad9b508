// What Hopper adds, in small wrappers: barriers in shared memory that count bytes, the copy engine that fills tiles,
// matrix products that a warpgroup issues on tiles in shared memory, and blocks that form a cluster.
//
// PTX ISA 8.0 and later, sections on mbarrier, cp.async.bulk.tensor, wgmma and barrier.cluster.
#pragma once
#include "mma.h"

constexpr int kWarpgroup = 128;

// Made by cuTensorMapEncodeTiled on the host.
struct alignas(64) TensorMap {
  uint8 opaque[128];
};

// Barriers. A phase ends when `arrivals` threads have arrived and all bytes that were announced have come; a waiter
// names the parity of the phase whose end it waits for.
__device__ inline void init_barrier(uint64 *barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals));
}
// Makes initialised barriers known to the copy engine and to the cluster.
__device__ inline void fence_barrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void arrive(uint64 *barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
__device__ inline void arrive_and_expect(uint64 *barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}
__device__ inline void wait(uint64 *barrier, int parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra finished;\n"
      "bra again;\n"
      "finished:\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

// The copy engine. One thread asks for a box of a matrix, from `column` and `row` on; its bytes arrive at the barrier.
__device__ inline void prefetch(const TensorMap *map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}
__device__ inline void fetch_box(void *tile, const TensorMap *map, uint64 *barrier, int column, int row) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(tile)),
      "l"(map), "r"(column), "r"(row), "r"(shared_address(barrier))
      : "memory");
}

// A run of bytes, a multiple of 16, from and to multiples of 16.
__device__ inline void fetch_bytes(void *to, const void *from, int bytes, uint64 *barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Ordinary writes to shared memory, before a barrier after which the copy engine or the tensor cores read it.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Barrier `id` of the block for `threads` of its threads. 0 is __syncthreads'.
__device__ inline void sync_threads(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
// The same without waiting: the others wait for this thread.
__device__ inline void arrive_threads(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Registers are handed from the warpgroup that fetches to those that multiply.
template <int kRegisters>
__device__ inline void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}
template <int kRegisters>
__device__ inline void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// The inverse of load_matrices.
__device__ inline void store_matrices(void *row, const uint32 (&x)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(x[0]),
               "r"(x[1]), "r"(x[2]), "r"(x[3])
               : "memory");
}

// Clusters.
__device__ inline int cluster_rank() {
  int rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ inline void sync_cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// The address of the same place in the shared memory of another block of the cluster.
__device__ inline uint32 peer_address(const void *pointer, int rank) {
  uint32 result;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(result) : "r"(shared_address(pointer)), "r"(rank));
  return result;
}
__device__ inline void store_peer(uint32 address, float4 x) {
  asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(x.x), "f"(x.y), "f"(x.z), "f"(x.w)
               : "memory");
}

// Descriptors of operand tiles whose rows of 128 bytes are swizzled. Along K: 8 rows lie 1,024 bytes from the next 8.
// Along M or N: a strip is 64 elements wide and kDepth deep, strips follow one another.
constexpr int kDepth = 64;  // of a tile in K: 128 bytes of 16-bit elements
constexpr int kStrip = 64;  // elements of M or N that a row of 128 bytes holds
constexpr int kStripBytes = kDepth * kStrip * 2;

__device__ inline uint64 describe(const void *tile, int leading_bytes) {
  constexpr uint64 kGroupOfRows = 1024 / 16, kSwizzle128 = 1;
  return uint64((shared_address(tile) & 0x3FFFF) >> 4) | uint64(leading_bytes >> 4) << 16 | kGroupOfRows << 32 |
         kSwizzle128 << 62;
}

// Products. Between `begin_products` and `end_products` a warpgroup issues them; they run in order, and their
// accumulators must be left alone until `wait_products` says that all but the last kPending groups are done.
__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void end_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Products change x unseen by the compiler. What reads x stays behind wait_products, and what writes it before
// begin_products, if this stands next to them.
template <int kCount>
__device__ __forceinline__ void pin(float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; i++) asm volatile("" : "+f"(x[i])::"memory");
}

#define KRNL_REGISTERS_0 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define KRNL_REGISTERS_1 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define KRNL_REGISTERS_2 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define KRNL_REGISTERS_3 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define KRNL_REGISTERS_4 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define KRNL_REGISTERS_5 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define KRNL_REGISTERS_6 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"
#define KRNL_REGISTERS_7 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define KRNL_FLOATS_16(x, i)                                                                                        \
  "+f"(x[i]), "+f"(x[i + 1]), "+f"(x[i + 2]), "+f"(x[i + 3]), "+f"(x[i + 4]), "+f"(x[i + 5]), "+f"(x[i + 6]),          \
      "+f"(x[i + 7]), "+f"(x[i + 8]), "+f"(x[i + 9]), "+f"(x[i + 10]), "+f"(x[i + 11]), "+f"(x[i + 12]),               \
      "+f"(x[i + 13]), "+f"(x[i + 14]), "+f"(x[i + 15])

// acc[64, kColumns] (+)= a b over 16 values of K, each operand a tile in shared memory; kAlongM and kAlongN say that it
// lies along M or N. Thread t of the warpgroup has, for every 8 columns j, elements (row, column) and (row, column + 1)
// in acc[4j], acc[4j + 1] and the same of row + 8 in acc[4j + 2], acc[4j + 3], with row = t / 32 · 16 + t % 32 / 4 and
// column = 8j + 2 (t % 4).
template <typename T, int kColumns, bool kAlongM, bool kAlongN>
struct Product;

#define KRNL_PRODUCT(COLUMNS, TYPE, REGISTERS, A, B, ADDS, ALONG_M, ALONG_N, ...)                                      \
  template <bool kAlongM, bool kAlongN>                                                                                \
  struct Product<TYPE, COLUMNS, kAlongM, kAlongN> {                                                                    \
    __device__ static inline void add(float *x, uint64 a, uint64 b, int adds) {                                        \
      asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS ", 0;\n"                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." #TYPE "." #TYPE " {" REGISTERS "}, " A       \
                   ", " B ", adds, 1, 1, " ALONG_M ", " ALONG_N ";\n}\n"                                              \
                   : __VA_ARGS__                                                                                       \
                   : "l"(a), "l"(b), "r"(adds), "n"(int(kAlongM)), "n"(int(kAlongN)));                                 \
    }                                                                                                                  \
  };
// For both types of elements.
#define KRNL_PRODUCTS(COLUMNS, REGISTERS, A, B, ADDS, ALONG_M, ALONG_N, ...)                                           \
  KRNL_PRODUCT(COLUMNS, bf16, REGISTERS, A, B, ADDS, ALONG_M, ALONG_N, __VA_ARGS__)                                    \
  KRNL_PRODUCT(COLUMNS, f16, REGISTERS, A, B, ADDS, ALONG_M, ALONG_N, __VA_ARGS__)
KRNL_PRODUCTS(64, KRNL_REGISTERS_0 ", " KRNL_REGISTERS_1, "%32", "%33", "%34", "%35", "%36", KRNL_FLOATS_16(x, 0),
              KRNL_FLOATS_16(x, 16))
KRNL_PRODUCTS(96, KRNL_REGISTERS_0 ", " KRNL_REGISTERS_1 ", " KRNL_REGISTERS_2, "%48", "%49", "%50", "%51", "%52",
              KRNL_FLOATS_16(x, 0), KRNL_FLOATS_16(x, 16), KRNL_FLOATS_16(x, 32))
KRNL_PRODUCTS(128, KRNL_REGISTERS_0 ", " KRNL_REGISTERS_1 ", " KRNL_REGISTERS_2 ", " KRNL_REGISTERS_3, "%64", "%65",
              "%66", "%67", "%68", KRNL_FLOATS_16(x, 0), KRNL_FLOATS_16(x, 16), KRNL_FLOATS_16(x, 32),
              KRNL_FLOATS_16(x, 48))
KRNL_PRODUCTS(192,
              KRNL_REGISTERS_0 ", " KRNL_REGISTERS_1 ", " KRNL_REGISTERS_2 ", " KRNL_REGISTERS_3 ", " KRNL_REGISTERS_4
                               ", " KRNL_REGISTERS_5,
              "%96", "%97", "%98", "%99", "%100", KRNL_FLOATS_16(x, 0), KRNL_FLOATS_16(x, 16), KRNL_FLOATS_16(x, 32),
              KRNL_FLOATS_16(x, 48), KRNL_FLOATS_16(x, 64), KRNL_FLOATS_16(x, 80))
KRNL_PRODUCTS(256,
              KRNL_REGISTERS_0 ", " KRNL_REGISTERS_1 ", " KRNL_REGISTERS_2 ", " KRNL_REGISTERS_3 ", " KRNL_REGISTERS_4
                               ", " KRNL_REGISTERS_5 ", " KRNL_REGISTERS_6 ", " KRNL_REGISTERS_7,
              "%128", "%129", "%130", "%131", "%132", KRNL_FLOATS_16(x, 0), KRNL_FLOATS_16(x, 16),
              KRNL_FLOATS_16(x, 32), KRNL_FLOATS_16(x, 48), KRNL_FLOATS_16(x, 64), KRNL_FLOATS_16(x, 80),
              KRNL_FLOATS_16(x, 96), KRNL_FLOATS_16(x, 112))

// acc[64, kColumns] (+)= a b, with a's 16 values of K in registers: of each warp's 16 rows, as mma.m16n8k16 wants them.
template <typename T, int kColumns, bool kAlongN>
struct ProductFromRegisters;

#define KRNL_PRODUCT_FROM_REGISTERS(COLUMNS, TYPE, REGISTERS, A, B, ADDS, ALONG_N, ...)                                \
  template <bool kAlongN>                                                                                              \
  struct ProductFromRegisters<TYPE, COLUMNS, kAlongN> {                                                                \
    __device__ static inline void add(float *x, const uint32 (&a)[4], uint64 b, int adds) {                            \
      asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " ADDS ", 0;\n"                                            \
                   "wgmma.mma_async.sync.aligned.m64n" #COLUMNS "k16.f32." #TYPE "." #TYPE " {" REGISTERS "}, {" A     \
                   "}, " B ", adds, 1, 1, " ALONG_N ";\n}\n"                                                           \
                   : __VA_ARGS__                                                                                       \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds), "n"(int(kAlongN)));                \
    }                                                                                                                  \
  };
// For both types of elements.
#define KRNL_PRODUCTS_FROM_REGISTERS(COLUMNS, REGISTERS, A, B, ADDS, ALONG_N, ...)                                     \
  KRNL_PRODUCT_FROM_REGISTERS(COLUMNS, bf16, REGISTERS, A, B, ADDS, ALONG_N, __VA_ARGS__)                              \
  KRNL_PRODUCT_FROM_REGISTERS(COLUMNS, f16, REGISTERS, A, B, ADDS, ALONG_N, __VA_ARGS__)
KRNL_PRODUCTS_FROM_REGISTERS(64, KRNL_REGISTERS_0 ", " KRNL_REGISTERS_1, "%32, %33, %34, %35", "%36", "%37", "%38",
                             KRNL_FLOATS_16(x, 0), KRNL_FLOATS_16(x, 16))
KRNL_PRODUCTS_FROM_REGISTERS(96, KRNL_REGISTERS_0 ", " KRNL_REGISTERS_1 ", " KRNL_REGISTERS_2, "%48, %49, %50, %51",
                             "%52", "%53", "%54", KRNL_FLOATS_16(x, 0), KRNL_FLOATS_16(x, 16), KRNL_FLOATS_16(x, 32))
KRNL_PRODUCTS_FROM_REGISTERS(128, KRNL_REGISTERS_0 ", " KRNL_REGISTERS_1 ", " KRNL_REGISTERS_2 ", " KRNL_REGISTERS_3,
                             "%64, %65, %66, %67", "%68", "%69", "%70", KRNL_FLOATS_16(x, 0), KRNL_FLOATS_16(x, 16),
                             KRNL_FLOATS_16(x, 32), KRNL_FLOATS_16(x, 48))
