// A pool of threads that share out numbered pieces of work.
//
// Pieces are taken in order by whoever is free, so the threads end together; which thread does a piece must not
// change its result. Our own pool instead of OpenMP: Apple's compiler has none, and idle OpenMP threads keep spinning.
#pragma once
#include <cstdint>

namespace krnl {

// Threads of the pool, the caller among them.
int thread_count();
// As many as the system grants, if that is fewer.
void set_thread_count(int count);
// Drops the pool without a word to its threads, which a forked child does not have.
void forget_threads();

// Per-thread memory for packed panels and tiles, 64-byte aligned, never shared between threads. It keeps nothing from
// one piece of work to the next. At most kThreadScratch bytes may be used.
constexpr int64_t kThreadScratch = 4 << 20;
void* thread_scratch(int thread);

using Piece = void (*)(const void* body, int64_t index, int thread);
void run_pieces(int64_t count, Piece piece, const void* body);

// body(index, thread) for index in [0, count).
template <class Body>
void parallel_for(int64_t count, const Body& body) {
  run_pieces(count, [](const void* b, int64_t index, int thread) { (*static_cast<const Body*>(b))(index, thread); }, &body);
}

}  // namespace krnl
