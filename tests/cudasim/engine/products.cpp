// What tensor cores do: a warp's products and 8 × 8 matrices, and products of a warpgroup on tiles in shared memory.
// Their sums are there when threads have waited for them and not before.

#include <string.h>

#include <algorithm>

#include "../include/numbers.h"
#include "state.h"

namespace cudasim {

template <bool kBf16>
static inline float to_float(uint16_t bits) {
  return kBf16 ? from_bf16(bits) : from_f16(bits);
}

// ---- A warp's operations: slots hold what lanes give, then what they get ----

// Rows of four 8 × 8 matrices: lane l gives the address of row l % 8 of matrix l / 8.
static const uint16_t *row_of(const Slot *slots, int matrix, int row, Place place) {
  u32 address;
  memcpy(&address, slots[matrix * 8 + row].bytes, 4);
  return (const uint16_t *)shared_pointer(address, 16, 16, place);
}

static void load_matrices(Slot *slots, bool transposed, Place place) {
  uint16_t elements[4][8][8];
  for (int matrix = 0; matrix < 4; matrix++)
    for (int row = 0; row < 8; row++) memcpy(elements[matrix][row], row_of(slots, matrix, row, place), 16);
  for (int lane = 0; lane < kLanes; lane++)
    for (int matrix = 0; matrix < 4; matrix++) {
      const int i = lane / 4, j = lane % 4 * 2;
      const uint16_t low = transposed ? elements[matrix][j][i] : elements[matrix][i][j];
      const uint16_t high = transposed ? elements[matrix][j + 1][i] : elements[matrix][i][j + 1];
      const u32 two = low | u32(high) << 16;
      memcpy(slots[lane].bytes + 4 * matrix, &two, 4);
    }
}

// Lanes give an address and four registers.
static void store_matrices(Slot *slots, Place place) {
  for (int lane = 0; lane < kLanes; lane++)
    for (int matrix = 0; matrix < 4; matrix++) {
      char *row = (char *)row_of(slots, matrix, lane / 4, place);
      memcpy(row + lane % 4 * 4, slots[lane].bytes + 4 + 4 * matrix, 4);
    }
}

struct WarpOperands {
  u32 a[4], b[2];
  float c[4];
};

template <bool kBf16>
static void multiply(Slot *slots) {
  float a[16][16], b[16][8];
  const auto element = [](u32 two, int i) { return to_float<kBf16>(uint16_t(two >> 16 * i)); };
  for (int lane = 0; lane < kLanes; lane++) {
    WarpOperands own;
    memcpy(&own, slots[lane].bytes, sizeof own);
    const int group = lane / 4, pair = lane % 4 * 2;
    for (int i = 0; i < 2; i++) {
      for (int half = 0; half < 2; half++) {
        a[group + 8 * half][pair + i] = element(own.a[half], i);
        a[group + 8 * half][pair + 8 + i] = element(own.a[2 + half], i);
        b[pair + 8 * half + i][group] = element(own.b[half], i);
      }
    }
  }
  float c[16][8] = {};
  for (int i = 0; i < 16; i++)
    for (int k = 0; k < 16; k++)
      for (int j = 0; j < 8; j++) c[i][j] += a[i][k] * b[k][j];
  for (int lane = 0; lane < kLanes; lane++) {
    WarpOperands own;
    memcpy(&own, slots[lane].bytes, sizeof own);
    float sums[4];
    for (int i = 0; i < 4; i++) sums[i] = own.c[i] + c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    memcpy(slots[lane].bytes, sums, sizeof sums);
  }
}

void perform(Operation operation, Slot *slots, Place place) {
  switch (operation) {
    case Operation::sync:
    case Operation::gather: return;
    case Operation::load: return load_matrices(slots, false, place);
    case Operation::load_transposed: return load_matrices(slots, true, place);
    case Operation::store: return store_matrices(slots, place);
    case Operation::multiply_bf16: return multiply<true>(slots);
    case Operation::multiply_f16: return multiply<false>(slots);
  }
}

// ---- A warpgroup's products ----

constexpr u32 kRows = 64, kDepth = 16, kMostColumns = 256, kLine = 128;

struct Descriptor {
  u32 start, leading, stride;
};

static Descriptor decode(u64 bits, Place place) {
  const u32 swizzle = u32(bits >> 62), base = u32(bits >> 49) & 7;
  if (swizzle != 1 || base)
    fail("descriptor", place, "swizzle %u, base %u; the simulator knows that over 128 bytes", swizzle, base);
  return {u32(bits & 0x3FFF) << 4, u32(bits >> 16 & 0x3FFF) << 4, u32(bits >> 32 & 0x3FFF) << 4};
}

// to[k][i], from a tile whose lines of 128 bytes lie along K, or along M or N, and are swizzled by their address.
template <bool kBf16>
static void read_operand(float *to, u32 size, const Descriptor &tile, bool along_k, Place place) {
  const u32 lines = along_k ? size : kDepth, pieces = (along_k ? kDepth : size) / 8;
  for (u32 line = 0; line < lines; line++)
    for (u32 piece = 0; piece < pieces; piece++) {
      const u32 strip = along_k ? 0 : piece / 8, within = along_k ? piece : piece % 8;
      const u32 at = tile.start + strip * tile.leading + line / 8 * tile.stride + line % 8 * kLine + within * 16;
      const auto *from = (const uint16_t *)shared_pointer(at ^ (at / kLine % 8) << 4, 16, 16, place);
      for (u32 i = 0; i < 8; i++) {
        const float x = to_float<kBf16>(from[i]);
        if (along_k) to[(piece * 8 + i) * size + line] = x;
        else to[line * size + piece * 8 + i] = x;
      }
    }
}

// The rows of some warps of the warpgroup, `first` on, whose threads are given.
template <bool kBf16>
static void multiply_tiles(float *sums, Fiber *const *threads, u32 count, u32 first, size_t number, Place place) {
  const Product &product = threads[0]->products[number].product;
  static float a[kDepth * kRows], b[kDepth * kMostColumns];
  const u32 columns = product.columns;
  if (product.has_registers) {
    for (u32 thread = 0; thread < count; thread++) {
      const Fiber *fiber = threads[thread];
      const u32 t = fiber->index % kWarpgroup, row = t / 32 * 16 + t % 32 / 4, k = t % 4 * 2;
      for (u32 i = 0; i < 8; i++) {
        const u32 two = fiber->products[number].product.registers[i / 2];
        a[(k + i / 4 * 8 + i % 2) * kRows + row + i / 2 % 2 * 8] = to_float<kBf16>(uint16_t(two >> 16 * (i % 2)));
      }
    }
  } else {
    read_operand<kBf16>(a, kRows, decode(product.a, place), !product.along_m, place);
  }
  read_operand<kBf16>(b, columns, decode(product.b, place), !product.along_n, place);
  const u32 rows = count / 2;  // a warp has 16
  if (!product.adds) std::fill_n(sums + first * columns, rows * columns, 0.0f);
  for (u32 i = first; i < first + rows; i++)
    for (u32 j = 0; j < columns; j += 8) {
      float eight[8];
      memcpy(eight, sums + i * columns + j, sizeof eight);
      for (u32 k = 0; k < kDepth; k++)
        for (u32 l = 0; l < 8; l++) eight[l] += a[k * kRows + i] * b[k * columns + j + l];
      memcpy(sums + i * columns + j, eight, sizeof eight);
    }
}

// Calls act(register, its place in the sums) for all of a thread's.
template <typename Act>
static void for_each_register(const Fiber &fiber, u32 columns, Act act) {
  const u32 t = fiber.index % kWarpgroup, row = t / 32 * 16 + t % 32 / 4, column = t % 4 * 2;
  for (u32 i = 0; i < columns / 2; i++) act(i, (row + i / 2 % 2 * 8) * columns + i / 4 * 8 + column + i % 2);
}

static Warpgroup &own_warpgroup() {
  const Fiber &fiber = *cluster.current;
  return fiber.block->warpgroups[fiber.index / kWarpgroup];
}

static bool same(const Issued &x, const Issued &y) {
  const Product &a = x.product, &b = y.product;
  return x.sums == y.sums && x.group == y.group && a.columns == b.columns && a.bf16 == b.bf16 && a.adds == b.adds &&
         a.along_m == b.along_m && a.along_n == b.along_n && a.has_registers == b.has_registers && a.b == b.b &&
         (a.has_registers || a.a == b.a);
}

static void do_product(Warpgroup &group, Fiber *const *threads, u32 count, u32 first, size_t number, Place place) {
  const Issued &issued = threads[0]->products[number];
  float *sums = group.sums[issued.sums].get();
  issued.product.bf16 ? multiply_tiles<true>(sums, threads, count, first, number, place)
                      : multiply_tiles<false>(sums, threads, count, first, number, place);
}

// Where threads run in their order, a warp's rows are multiplied as soon as it has issued a product; else as late as a
// thread waits for it. What neither does is to write the sums before.
static bool products_are_early() { return cluster.launch->order == 0; }

// Does all groups of products but the last `pending`, and gives sums back of which none is in flight.
static void finish_products(Warpgroup &group, u32 pending, Place place) {
  const Fiber &first = *group.here[0];
  for (const Fiber *fiber : group.here) {
    bool alike = fiber->products.size() == first.products.size() && fiber->commits == first.commits;
    for (size_t i = 0; alike && i < first.products.size(); i++) alike = same(fiber->products[i], first.products[i]);
    if (!alike)
      fail("divergent warpgroup", place, "thread %u has issued other products than thread %u", fiber->index,
           first.index);
  }
  size_t done = 0;
  while (done < first.products.size() && first.products[done].group + pending < first.commits) {
    if (!products_are_early()) do_product(group, group.here.data(), kWarpgroup, 0, done, place);
    done++;
  }
  std::vector<bool> in_flight(first.flying.size());
  for (size_t i = done; i < first.products.size(); i++) in_flight[first.products[i].sums] = true;
  for (Fiber *fiber : group.here) {
    fiber->products.erase(fiber->products.begin(), fiber->products.begin() + long(done));
    for (size_t i = 0; i < fiber->flying.size(); i++) {
      Flying &flying = fiber->flying[i];
      if (in_flight[i] || !flying.registers) continue;
      for_each_register(*fiber, flying.columns, [&](u32 at, u32 place_of) {
        u32 bits;
        memcpy(&bits, flying.registers + at, 4);
        if (bits != ~0u)
          fail("sums in flight", place, "register %u of a running product was written by thread %u", at, fiber->index);
        flying.registers[at] = group.sums[i][place_of];
      });
      flying.registers = nullptr;
    }
    if (fiber->products.empty()) fiber->flying.clear();
  }
  if (first.products.empty()) group.sums.clear();
}

// The number of the thread's sums among those in flight; when they are new, their registers are poison from now on.
static u32 take_off(float *registers, u32 columns) {
  Fiber &fiber = *cluster.current;
  for (u32 i = 0; i < fiber.flying.size(); i++)
    if (fiber.flying[i].registers == registers) return i;
  const u32 number = u32(fiber.flying.size());
  fiber.flying.push_back({registers, columns});
  auto &sums = own_warpgroup().sums;
  if (sums.size() <= number) sums.push_back(std::make_unique<float[]>(kRows * columns));
  for_each_register(fiber, columns, [&](u32 at, u32 place) {
    sums[number][place] = registers[at];
    memset(registers + at, kPoison, 4);
  });
  return number;
}

bool finish_products_of_one() {
  if (cluster.waiting_for_products.empty()) return false;
  Warpgroup &group = *cluster.waiting_for_products.front();
  cluster.waiting_for_products.pop_front();
  finish_products(group, group.pending, group.place);
  for (Fiber *fiber : group.here) wake(fiber);
  group.here.clear();
  return true;
}

}  // namespace cudasim

using namespace cudasim;

extern "C" {

void cudasim_begin_products(void) { cluster.current->products_begun = true; }

void cudasim_product(float *sums, const Product &product) {
  Fiber &fiber = *cluster.current;
  if (!fiber.products_begun) fail("products", CUDASIM_HERE, "a product without wgmma.fence since the last group");
  fiber.products.push_back({product, take_off(sums, product.columns), fiber.commits});
  if (!products_are_early()) return;
  Warp &warp = *fiber.warp;
  for (const Fiber *lane : warp.fibers)
    if (lane->products.size() < fiber.products.size()) return;
  const u32 first_row = fiber.index % kWarpgroup / kLanes * 16;
  do_product(own_warpgroup(), warp.fibers, kLanes, first_row, fiber.products.size() - 1, CUDASIM_HERE);
}

void cudasim_end_products(void) {
  cluster.current->commits++;
  cluster.current->products_begun = false;
}

void cudasim_wait_products(u32 pending) {
  const Place place = CUDASIM_HERE;
  Fiber *fiber = cluster.current;
  Warpgroup &group = own_warpgroup();
  if (group.here.empty()) group.pending = pending;
  else if (group.pending != pending)
    fail("divergent warpgroup", place, "threads wait for all but %u and %u groups", pending, group.pending);
  group.here.push_back(fiber);
  group.place = place;
  if (group.here.size() == kWarpgroup) cluster.waiting_for_products.push_back(&group);
  wait_here(place, "products of the warpgroup, all but", pending);
}

}  // extern "C"
