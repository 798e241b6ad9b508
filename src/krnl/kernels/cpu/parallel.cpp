#include "parallel.h"

#include <atomic>
#include <condition_variable>
#include <stdlib.h>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace krnl {
namespace {

// How often an idle thread looks again before it sleeps or yields: some tens of microseconds, the usual gap between two
// dispatches.
constexpr int kLooks = 4000;

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A job's pieces are claimed one by one from a single word: the job's number above, the next piece below. The caller waits
// for pieces, not for threads: a worker that the system has not let run in time is not missed.
class Pool {
 public:
  int count() const { return static_cast<int>(workers_.size()) + 1; }

  void resize(int count) {
    if (count == this->count() && !scratch_.empty()) return;
    leaving_.store(true);
    announce(next_job(), 0);
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    for (void* memory : scratch_) free(memory);
    scratch_.clear();
    leaving_.store(false);
    const uint64_t seen = job_of(claim_.load());
    try {
      for (int thread = 0; thread < count; thread++) {
        void* memory = nullptr;
        if (posix_memalign(&memory, 4096, kThreadScratch) != 0) return;
        scratch_.push_back(memory);
        if (thread > 0) workers_.emplace_back([this, thread, seen] { serve(thread, seen); });
      }
    } catch (const std::system_error&) {
      // No more threads are to be had: the pool is as wide as it got.
    }
  }

  void* scratch(int thread) const { return scratch_[thread]; }

  void run(int64_t count, Piece piece, const void* body) {
    if (count <= 0) return;
    if (workers_.empty() || count == 1) {
      for (int64_t i = 0; i < count; i++) piece(body, i, 0);
      return;
    }
    const uint64_t job = next_job();  // from here on no worker can claim a piece of the last job
    piece_.store(piece, std::memory_order_release);
    body_.store(body, std::memory_order_release);
    count_.store(count, std::memory_order_release);
    done_.store(0, std::memory_order_release);
    announce(job, 0);
    work(job, 0);
    for (int look = 0; done_.load(std::memory_order_acquire) < count; look++) {
      if (look < kLooks) relax();
      else std::this_thread::yield();
    }
  }

 private:
  static constexpr uint64_t kClosed = 0xffffffff;  // a piece number beyond every count

  static uint64_t job_of(uint64_t claim) { return claim >> 32; }
  static int64_t piece_of(uint64_t claim) { return static_cast<int64_t>(claim & kClosed); }

  // Closes the current job for good; the new one is not open yet.
  uint64_t next_job() {
    const uint64_t job = (job_of(claim_.load(std::memory_order_relaxed)) + 1) & kClosed;
    claim_.store(job << 32 | kClosed);
    return job;
  }

  void announce(uint64_t job, uint64_t piece) {
    claim_.store(job << 32 | piece);
    if (sleepers_.load() == 0) return;
    { std::lock_guard<std::mutex> lock(mutex_); }  // whoever is about to sleep has either seen the job or sleeps by now
    wake_.notify_all();
  }

  void work(uint64_t job, int thread) {
    uint64_t claim = claim_.load(std::memory_order_acquire);
    for (;;) {
      const Piece piece = piece_.load(std::memory_order_acquire);
      const void* body = body_.load(std::memory_order_acquire);
      const int64_t count = count_.load(std::memory_order_acquire);
      if (job_of(claim) != job || piece_of(claim) >= count) return;
      // Whoever sees any of a later job's fields also sees that this job is closed (release, acquire), and then the
      // exchange fails: if it succeeds, what was read above is of this job.
      if (!claim_.compare_exchange_weak(claim, claim + 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      piece(body, piece_of(claim), thread);
      done_.fetch_add(1, std::memory_order_release);
      claim = claim_.load(std::memory_order_acquire);
    }
  }

  void serve(int thread, uint64_t seen) {
    // In one order with announce(): whoever falls asleep is counted there or sees the new job here.
    auto news = [&] { return job_of(claim_.load()) != seen; };
    for (;;) {
      for (int look = 0; look < kLooks && !news(); look++) relax();
      if (!news()) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleepers_.fetch_add(1);
        wake_.wait(lock, news);
        sleepers_.fetch_sub(1);
      }
      uint64_t claim;
      while (piece_of(claim = claim_.load(std::memory_order_acquire)) == static_cast<int64_t>(kClosed)) relax();  // about to open
      seen = job_of(claim);
      if (leaving_.load()) return;
      work(seen, thread);
    }
  }

  std::vector<std::thread> workers_;
  std::vector<void*> scratch_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<uint64_t> claim_{kClosed};
  std::atomic<int> sleepers_{0};
  std::atomic<int64_t> count_{0}, done_{0};
  std::atomic<Piece> piece_{nullptr};
  std::atomic<const void*> body_{nullptr};
  std::atomic<bool> leaving_{false};
};

Pool* instance = new Pool;  // never destroyed: at exit the threads are gone before static objects are
Pool& pool() { return *instance; }

}  // namespace

int thread_count() { return pool().count(); }
void set_thread_count(int count) { pool().resize(count); }
void forget_threads() {
  instance = new Pool;
  instance->resize(1);
}
void* thread_scratch(int thread) { return pool().scratch(thread); }
void run_pieces(int64_t count, Piece piece, const void* body) { pool().run(count, piece, body); }

}  // namespace krnl
