// Barriers and the functions by which lanes of a simdgroup or quadgroup exchange values. All of them rest on the
// engine's sim_gather. They are inlined, so that each call in the source is a call site of its own for the engine.
#pragma once
#include "../engine/engine.h"
#include "common.h"

namespace metal {

enum class mem_flags {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16
};
METALSIM_FUNCTION constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(int(a) | int(b)); }
METALSIM_FUNCTION constexpr mem_flags operator&(mem_flags a, mem_flags b) { return mem_flags(int(a) & int(b)); }

// The engine orders device and threadgroup memory. The other kinds do not exist here.
METALSIM_FUNCTION void threadgroup_barrier(mem_flags flags) { sim_threadgroup_barrier(uint(flags) & 3); }
METALSIM_FUNCTION void simdgroup_barrier(mem_flags flags) { sim_simdgroup_barrier(uint(flags) & 3); }

}  // namespace metal

namespace metalsim {

METALSIM_FUNCTION uint lane() { return sim_thread()->thread_index_in_simdgroup; }

// What the lanes hold, by lane. Values of lanes that take no part are undefined.
template <class T>
struct gathered {
  const T *values;
  uint active;

  METALSIM_FUNCTION const T &operator[](uint lane) const { return values[lane]; }
  METALSIM_FUNCTION bool takes_part(uint lane) const { return active >> lane & 1; }
};

template <class T>
METALSIM_FUNCTION gathered<T> gather(T value) {
  static_assert(sizeof(T) <= SIM_GATHER_BYTES, "a type that no simdgroup function takes");
  gathered<T> all;
  all.values = (const T *)sim_gather(&value, sizeof(T), &all.active);
  return all;
}

#define METALSIM_REDUCTION(name, result)                                  \
  struct name {                                                           \
    template <class T>                                                    \
    METALSIM_FUNCTION T operator()(T a, T b) const {                      \
      return T(result);                                                   \
    }                                                                     \
  };
METALSIM_REDUCTION(sum, a + b)
METALSIM_REDUCTION(product, a *b)
METALSIM_REDUCTION(least, metal::min(a, b))
METALSIM_REDUCTION(greatest, metal::max(a, b))
METALSIM_REDUCTION(bitwise_and, a &b)
METALSIM_REDUCTION(bitwise_or, a | b)
METALSIM_REDUCTION(bitwise_xor, a ^ b)
#undef METALSIM_REDUCTION

// A tree over the lanes from `first` that take part. Which lanes meet first is not known of Apple's GPUs: the
// launch may ask for another order.
template <int Lanes, class T, class F>
METALSIM_FUNCTION T reduce(T value, F f, uint first = 0) {
  const gathered<T> all = gather(value);
  const uint order = sim_thread()->threadgroup->sum_order & (Lanes - 1);
  T values[Lanes];
  uint count = 0;
  for (uint i = 0; i < Lanes; i++)
    if (all.takes_part(first + (i ^ order))) values[count++] = all[first + (i ^ order)];
  while (count > 1) {
    const uint half = (count + 1) / 2;
    for (uint i = 0; i + half < count; i++) values[i] = f(values[i], values[i + half]);
    count = half;
  }
  return values[0];
}
template <class T, class F>
METALSIM_FUNCTION T reduce_simd(T value, F f) {
  return reduce<SIM_LANES>(value, f);
}
METALSIM_FUNCTION uint quad_start() { return lane() & ~3u; }
template <class T, class F>
METALSIM_FUNCTION T reduce_quad(T value, F f) {
  return reduce<4>(value, f, quad_start());
}

// f over the lanes from `first` up to this one, which counts if `inclusive`.
template <class T, class F>
METALSIM_FUNCTION T prefix(T value, T neutral, F f, uint first, bool inclusive) {
  const gathered<T> all = gather(value);
  const uint stop = lane() + inclusive;
  T result = neutral;
  for (uint i = first; i < stop; i++)
    if (all.takes_part(i)) result = f(result, all[i]);
  return result;
}

// The value of another lane of the same group of Lanes; of this lane where there is none.
template <int Lanes, class T>
METALSIM_FUNCTION T of_lane(T value, uint lane_in_group, bool exists = true) {
  const gathered<T> all = gather(value);
  const uint first = lane() & ~uint(Lanes - 1);
  return exists ? all[first + (lane_in_group & (Lanes - 1))] : value;
}

}  // namespace metalsim

namespace metal {

// The reductions and shuffles that a simdgroup (32 lanes) and a quadgroup (4 lanes) both have.
#define METALSIM_LANE_FUNCTIONS(group, Lanes)                                                                      \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_sum(T x) { return ::metalsim::reduce_##group(x, ::metalsim::sum()); }                \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_product(T x) { return ::metalsim::reduce_##group(x, ::metalsim::product()); }        \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_min(T x) { return ::metalsim::reduce_##group(x, ::metalsim::least()); }              \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_max(T x) { return ::metalsim::reduce_##group(x, ::metalsim::greatest()); }           \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_and(T x) { return ::metalsim::reduce_##group(x, ::metalsim::bitwise_and()); }        \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_or(T x) { return ::metalsim::reduce_##group(x, ::metalsim::bitwise_or()); }          \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_xor(T x) { return ::metalsim::reduce_##group(x, ::metalsim::bitwise_xor()); }        \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_prefix_inclusive_sum(T x) {                                                          \
    return ::metalsim::prefix(x, T(0), ::metalsim::sum(), ::metalsim::lane() & ~(Lanes - 1u), true);               \
  }                                                                                                                \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_prefix_exclusive_sum(T x) {                                                          \
    return ::metalsim::prefix(x, T(0), ::metalsim::sum(), ::metalsim::lane() & ~(Lanes - 1u), false);              \
  }                                                                                                                \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_prefix_inclusive_product(T x) {                                                      \
    return ::metalsim::prefix(x, T(1), ::metalsim::product(), ::metalsim::lane() & ~(Lanes - 1u), true);           \
  }                                                                                                                \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_prefix_exclusive_product(T x) {                                                      \
    return ::metalsim::prefix(x, T(1), ::metalsim::product(), ::metalsim::lane() & ~(Lanes - 1u), false);          \
  }                                                                                                                \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_broadcast(T x, ushort lane) { return ::metalsim::of_lane<Lanes>(x, lane); }          \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_shuffle(T x, ushort lane) { return ::metalsim::of_lane<Lanes>(x, lane); }            \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_shuffle_xor(T x, ushort mask) {                                                      \
    return ::metalsim::of_lane<Lanes>(x, ::metalsim::lane() ^ mask);                                               \
  }                                                                                                                \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_shuffle_up(T x, ushort delta) {                                                      \
    const uint lane = ::metalsim::lane() % Lanes;                                                                  \
    return ::metalsim::of_lane<Lanes>(x, lane - delta, lane >= delta);                                             \
  }                                                                                                                \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_shuffle_down(T x, ushort delta) {                                                    \
    const uint lane = ::metalsim::lane() % Lanes;                                                                  \
    return ::metalsim::of_lane<Lanes>(x, lane + delta, lane + delta < Lanes);                                      \
  }                                                                                                                \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_shuffle_rotate_up(T x, ushort delta) {                                               \
    return ::metalsim::of_lane<Lanes>(x, ::metalsim::lane() - delta);                                              \
  }                                                                                                                \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_shuffle_rotate_down(T x, ushort delta) {                                             \
    return ::metalsim::of_lane<Lanes>(x, ::metalsim::lane() + delta);                                              \
  }                                                                                                                \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_shuffle_and_fill_up(T x, T filling, ushort delta, ushort modulo = Lanes) {           \
    const uint lane = ::metalsim::lane() % modulo, first = ::metalsim::lane() - lane;                              \
    const T moved = ::metalsim::of_lane<Lanes>(x, first + lane - delta);                                           \
    const T filled = ::metalsim::of_lane<Lanes>(filling, first + lane + modulo - delta);                           \
    return lane >= delta ? moved : filled;                                                                         \
  }                                                                                                                \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_shuffle_and_fill_down(T x, T filling, ushort delta, ushort modulo = Lanes) {         \
    const uint lane = ::metalsim::lane() % modulo, first = ::metalsim::lane() - lane;                              \
    const T moved = ::metalsim::of_lane<Lanes>(x, first + lane + delta);                                           \
    const T filled = ::metalsim::of_lane<Lanes>(filling, first + lane + delta - modulo);                           \
    return lane + delta < modulo ? moved : filled;                                                                 \
  }                                                                                                                \
  struct group##_vote {                                                                                            \
    using vote_t = ulong;                                                                                          \
    METALSIM_FUNCTION constexpr explicit group##_vote(vote_t bits_ = 0) : bits(bits_) {}                           \
    METALSIM_FUNCTION constexpr explicit operator vote_t() const { return bits; }                                  \
    METALSIM_FUNCTION constexpr bool any() const { return bits != 0; }                                             \
    METALSIM_FUNCTION constexpr bool all() const { return bits == (1ul << Lanes) - 1; }                            \
                                                                                                                   \
   private:                                                                                                        \
    vote_t bits;                                                                                                   \
  };                                                                                                               \
  METALSIM_FUNCTION group##_vote group##_active_threads_mask() {                                                   \
    return group##_vote(::metalsim::active_lanes<Lanes>());                                                        \
  }                                                                                                                \
  METALSIM_FUNCTION group##_vote group##_ballot(bool x) {                                                          \
    return group##_vote(::metalsim::ballot<Lanes>(x).votes);                                                       \
  }                                                                                                                \
  METALSIM_FUNCTION bool group##_any(bool x) { return ::metalsim::ballot<Lanes>(x).votes != 0; }                   \
  METALSIM_FUNCTION bool group##_all(bool x) {                                                                     \
    const ::metalsim::ballot_result result = ::metalsim::ballot<Lanes>(x);                                         \
    return result.votes == result.active;                                                                          \
  }                                                                                                                \
  METALSIM_FUNCTION bool group##_is_first() {                                                                      \
    return (::metalsim::lane() % Lanes) == uint(__builtin_ctz(::metalsim::active_lanes<Lanes>()));                 \
  }                                                                                                                \
  METALSIM_FUNCTION bool group##_is_helper_thread() { return false; }                                              \
  template <class T>                                                                                               \
  METALSIM_FUNCTION T group##_broadcast_first(T x) {                                                               \
    const ::metalsim::gathered<T> all = ::metalsim::gather(x);                                                     \
    const uint first = ::metalsim::lane() & ~(Lanes - 1u);                                                         \
    return all[first + __builtin_ctz(all.active >> first)];                                                        \
  }

}  // namespace metal

namespace metalsim {

struct ballot_result {
  uint votes, active;  // a bit for each lane of the group
};
template <int Lanes>
METALSIM_FUNCTION ballot_result ballot(bool vote) {
  const gathered<bool> all = gather(vote);
  const uint first = lane() & ~(Lanes - 1u), group = Lanes == 32 ? ~0u : (1u << (Lanes & 31)) - 1;
  ballot_result result = {0, (all.active >> first) & group};
  for (uint i = 0; i < Lanes; i++)
    if (result.active >> i & 1) result.votes |= uint(all[first + i]) << i;
  return result;
}
template <int Lanes>
METALSIM_FUNCTION uint active_lanes() {
  return ballot<Lanes>(true).active;
}

}  // namespace metalsim

namespace metal {
METALSIM_LANE_FUNCTIONS(simd, 32)
METALSIM_LANE_FUNCTIONS(quad, 4)
#undef METALSIM_LANE_FUNCTIONS
}  // namespace metal
