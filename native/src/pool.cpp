#include "pool.h"

#include <chrono>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#ifdef __linux__
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
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
using Clock = std::chrono::steady_clock;
// After so long the caller looks whether who holds the last items still runs; over kLook a running thread's CPU time grows.
constexpr auto kStall = std::chrono::microseconds(50), kLook = std::chrono::microseconds(20);
// A worker that misses so many loops, of 5 to 200 us each, has lost its core.
constexpr uint64_t kMissed = 8;
// The longest that the caller sleeps without looking again.
constexpr auto kNap = std::chrono::microseconds(500);

#ifdef __linux__
int this_core() { return sched_getcpu(); }
int this_thread() { return (int)syscall(SYS_gettid); }
// CPU time of a thread of this process, as the kernel numbers the clocks of threads.
int64_t cpu_ns(int thread) {
  timespec t;
  return clock_gettime((clockid_t)(~(unsigned)thread << 3 | 6), &t) == 0 ? t.tv_sec * 1000000000ll + t.tv_nsec : 0;
}
// Leave a thread to run on `core` alone, or on all but `core`, and at once wherever it was allowed to.
bool move(int thread, int core, bool to) {
  cpu_set_t all, set;
  if (core < 0 || core >= CPU_SETSIZE || sched_getaffinity(thread, sizeof(all), &all) != 0 || !CPU_ISSET(core, &all) || CPU_COUNT(&all) < 2) return false;
  if (to) {
    CPU_ZERO(&set);
    CPU_SET(core, &set);
  } else {
    set = all;
    CPU_CLR(core, &set);
  }
  if (sched_setaffinity(thread, sizeof(set), &set) != 0) return false;
  sched_setaffinity(thread, sizeof(all), &all);
  return true;
}
#else
int this_core() { return -1; }
int this_thread() { return 0; }
int64_t cpu_ns(int) { return 0; }
bool move(int, int, bool) { return false; }
#endif
}  // namespace

Pool::Pool(int threads, std::vector<int> pin) : threads_(threads < 1 ? 1 : threads), shares_(threads_), movable_(pin.empty() && (unsigned)threads_ <= std::thread::hardware_concurrency()) {
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
  caller_core_.store(this_core(), std::memory_order_relaxed);
  open_.store(++loops_, std::memory_order_seq_cst);
  if (movable_ && loops_ % kMissed == 0) push_absent();
  if (sleeping_.load(std::memory_order_seq_cst) > 0) {
    std::lock_guard<std::mutex> lock(mutex_);
    wake_.notify_all();
  }
  work(0);
  open_.store(0, std::memory_order_seq_cst);
  if (active_.load(std::memory_order_seq_cst) != 0) wait_for_items();
}

// Workers are still in an item.
void Pool::wait_for_items() {
  auto until = Clock::now() + kStall;
  for (int spins = 1; active_.load(std::memory_order_seq_cst) != 0; spins++) {
    relax();
    if (spins % 64 != 0 || Clock::now() < until) continue;
    if (movable_ && pull_one()) {
      std::unique_lock<std::mutex> lock(mutex_);
      caller_sleeps_.store(true, std::memory_order_seq_cst);
      done_.wait_for(lock, kNap, [&] { return active_.load(std::memory_order_seq_cst) == 0; });
      caller_sleeps_.store(false, std::memory_order_seq_cst);
    } else {
      std::this_thread::yield();  // one of them may need the very core this thread spins on
    }
    until = Clock::now() + kStall;
  }
}

// Bring a worker that is inside the loop but does not run to this core; whether there was one.
bool Pool::pull_one() {
  for (int i = 1; i < threads_; i++) {
    const int id = shares_[i].id.load(std::memory_order_relaxed);
    if (id == 0 || !shares_[i].inside.load(std::memory_order_seq_cst)) continue;
    const int64_t before = cpu_ns(id);
    const auto until = Clock::now() + kLook;
    while (Clock::now() < until) relax();
    if (active_.load(std::memory_order_seq_cst) == 0) return false;
    const std::unique_lock<std::mutex> lock(moving_, std::try_to_lock);  // or the worker is just about to move itself
    if (lock && shares_[i].inside.load(std::memory_order_seq_cst) && cpu_ns(id) == before && move(id, this_core(), true)) {
      pulled_.fetch_add(1, std::memory_order_relaxed);
      return true;
    }
  }
  return false;
}

// A worker that is awake and has missed several loops waits for a core. It may be the caller's, where it would wait for the rest of the
// step: the system likes to wake a thread where its waker runs, and moves nobody who ran a moment ago.
void Pool::push_absent() {
  const int core = this_core();
  for (int i = 1; i < threads_; i++) {
    Share& share = shares_[i];
    const int id = share.id.load(std::memory_order_relaxed);
    if (id == 0 || share.asleep.load(std::memory_order_relaxed) || loops_ - share.joined.load(std::memory_order_relaxed) <= kMissed) continue;
    const std::unique_lock<std::mutex> lock(moving_, std::try_to_lock);
    if (lock && move(id, core, false)) pushed_.fetch_add(1, std::memory_order_relaxed);
  }
}

void Pool::leave_callers_core(int index) {
  const int core = this_core();
  if (!movable_ || core < 0 || core != caller_core_.load(std::memory_order_relaxed)) return;
  const std::lock_guard<std::mutex> lock(moving_);
  if (move(shares_[index].id.load(std::memory_order_relaxed), core, false)) left_.fetch_add(1, std::memory_order_relaxed);
}

void Pool::worker(int index) {
  shares_[index].id.store(this_thread(), std::memory_order_relaxed);
  uint64_t last = 0;
  const auto waiting = [&] {
    const uint64_t now = open_.load(std::memory_order_seq_cst);
    return now == 0 || now == last;
  };
  for (;;) {
    auto until = Clock::now() + kSpin;
    int spins = 0;
    while (waiting()) {
      relax();
      if ((++spins & 63) == 0 && Clock::now() > until) {
        std::unique_lock<std::mutex> lock(mutex_);
        sleeping_.fetch_add(1, std::memory_order_seq_cst);
        shares_[index].asleep.store(true, std::memory_order_relaxed);
        wake_.wait(lock, [&] { return stop_.load() || !waiting(); });
        shares_[index].asleep.store(false, std::memory_order_relaxed);
        sleeping_.fetch_sub(1, std::memory_order_seq_cst);
        if (stop_.load()) return;
        leave_callers_core(index);
        until = Clock::now() + kSpin;
      }
    }
    shares_[index].inside.store(true, std::memory_order_seq_cst);
    active_.fetch_add(1, std::memory_order_seq_cst);
    const uint64_t now = open_.load(std::memory_order_seq_cst);
    if (now != 0 && now != last) {
      last = now;
      shares_[index].joined.store(now, std::memory_order_relaxed);
      work(index);
    }
    shares_[index].inside.store(false, std::memory_order_seq_cst);
    if (active_.fetch_sub(1, std::memory_order_seq_cst) == 1 && caller_sleeps_.load(std::memory_order_seq_cst)) {
      std::lock_guard<std::mutex> lock(mutex_);
      done_.notify_one();
    }
    leave_callers_core(index);
  }
}

}  // namespace headrace
