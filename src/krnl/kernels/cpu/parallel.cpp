#include "parallel.h"

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <thread>
#include <vector>

namespace krnl {
namespace {

// How often an idle thread looks again before it sleeps: some tens of microseconds, the usual gap between two dispatches.
constexpr int kLooks = 4000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class Pool {
 public:
  ~Pool() { resize(1); }

  int count() const { return static_cast<int>(workers_.size()) + 1; }

  void resize(int count) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      leaving_ = true;
      ticket_.fetch_add(1);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    for (void* memory : scratch_) std::free(memory);
    scratch_.clear();
    leaving_ = false;
    for (int thread = 0; thread < count; thread++) scratch_.push_back(std::aligned_alloc(4096, kThreadScratch));
    for (int thread = 1; thread < count; thread++) workers_.emplace_back([this, thread, seen = ticket_.load()] { serve(thread, seen); });
  }

  void* scratch(int thread) const { return scratch_[thread]; }

  void run(int64_t count, Piece piece, const void* body) {
    if (count <= 0) return;
    if (workers_.empty() || count == 1) {
      for (int64_t i = 0; i < count; i++) piece(body, i, 0);
      return;
    }
    piece_ = piece;
    body_ = body;
    count_ = count;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(mutex_);  // a worker that is about to sleep must not miss the ticket
      ticket_.fetch_add(1, std::memory_order_release);
    }
    if (sleepers_.load() > 0) wake_.notify_all();
    work(0);
    for (int look = 0; busy_.load(std::memory_order_acquire) > 0; look++) {
      if (look < kLooks) relax();
      else std::this_thread::yield();
    }
  }

 private:
  void work(int thread) {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) piece_(body_, i, thread);
  }

  void serve(int thread, uint64_t seen) {
    for (;;) {
      for (int look = 0; look < kLooks && ticket_.load(std::memory_order_acquire) == seen; look++) relax();
      if (ticket_.load(std::memory_order_acquire) == seen) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, [&] { return ticket_.load(std::memory_order_acquire) != seen; });
        sleepers_.fetch_sub(1);
      }
      seen = ticket_.load(std::memory_order_acquire);
      if (leaving_) return;
      work(thread);
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::vector<std::thread> workers_;
  std::vector<void*> scratch_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> ticket_{0};
  std::atomic<int> sleepers_{0}, busy_{0};
  std::atomic<int64_t> next_{0};
  int64_t count_ = 0;
  Piece piece_ = nullptr;
  const void* body_ = nullptr;
  bool leaving_ = false;
};

Pool& pool() {
  static Pool* instance = new Pool;  // never destroyed: at exit the threads are gone before static objects are
  return *instance;
}

}  // namespace

int thread_count() { return pool().count(); }
void set_thread_count(int count) { pool().resize(count); }
void* thread_scratch(int thread) { return pool().scratch(thread); }
void run_pieces(int64_t count, Piece piece, const void* body) { pool().run(count, piece, body); }

}  // namespace krnl
