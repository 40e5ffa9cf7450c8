#include "pool.h"

#include <chrono>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#endif

namespace headrace {
namespace {
inline void relax() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}
// Long enough to bridge the serial parts of a step and the sampling after it, short enough that an idle server sleeps.
constexpr auto kSpin = std::chrono::microseconds(100);
}  // namespace

Pool::Pool(int threads, std::vector<int> pin) : threads_(threads < 1 ? 1 : threads), shares_(threads_) {
  for (int i = 1; i < threads_; i++) {
    workers_.emplace_back([this, i] { worker(i); });
#ifdef __linux__
    if (!pin.empty()) {
      cpu_set_t set;
      CPU_ZERO(&set);
      CPU_SET(pin[i % pin.size()], &set);
      pthread_setaffinity_np(workers_.back().native_handle(), sizeof(set), &set);
    }
#endif
  }
}

Pool::~Pool() {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_.store(true);
  }
  wake_.notify_all();
  for (auto& t : workers_) t.join();
}

void Pool::work(int thread) {
  for (int i = 0; i < threads_; i++) {
    Share& share = shares_[(thread + i) % threads_];
    while (share.next.load(std::memory_order_relaxed) < share.end) {
      const int64_t item = share.next.fetch_add(1, std::memory_order_relaxed);
      if (item >= share.end) break;
      call_(ctx_, item, thread);
    }
  }
}

void Pool::start(Call call, void* ctx, int64_t items) {
  call_ = call;
  ctx_ = ctx;
  for (int i = 0; i < threads_; i++) {
    shares_[i].next.store(items * i / threads_, std::memory_order_relaxed);
    shares_[i].end = items * (i + 1) / threads_;
  }
  open_.store(++loops_, std::memory_order_seq_cst);
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  work(0);
  open_.store(0, std::memory_order_seq_cst);
  // Workers still in an item. Yield after a while: one of them may need the very core this thread spins on.
  for (int spins = 0; active_.load(std::memory_order_seq_cst) != 0; spins++) {
    if (spins < 4000)
      relax();
    else
      std::this_thread::yield();
  }
}

void Pool::worker(int index) {
  uint64_t last = 0;
  const auto waiting = [&] {
    const uint64_t now = open_.load(std::memory_order_seq_cst);
    return now == 0 || now == last;
  };
  for (;;) {
    auto until = std::chrono::steady_clock::now() + kSpin;
    int spins = 0;
    while (waiting()) {
      relax();
      if ((++spins & 63) == 0 && std::chrono::steady_clock::now() > until) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        wake_.wait(lock, [&] { return stop_.load() || !waiting(); });
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
        if (stop_.load()) return;
      }
    }
    active_.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t now = open_.load(std::memory_order_seq_cst);
    if (now != 0 && now != last) {
      last = now;
      work(index);
    }
    active_.fetch_sub(1, std::memory_order_seq_cst);
  }
}

}  // namespace headrace
