// A small thread pool made for many short parallel loops: every thread has a run of items of its own, since memory is read
// fastest in long runs, and takes from the others' when it is through; so one that a neighbour slows does fewer. Items are
// handed out one at a time from atomic counters; workers spin briefly between loops and then sleep.
//
// Beside other processes (Linux, threads neither pinned nor more than CPUs): a thread that a neighbour keeps from its core may hold an item that all
// wait for. The caller sees that such a worker's CPU time stands still, moves it to its own core and sleeps until the item is
// done; a worker on the caller's core moves itself to another one, since the system often wakes it where it last ran. One that does not even get to run
// there is sent away by the caller once it has missed some loops.
#pragma once
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace headrace {

class Pool {
 public:
  // `threads` counts the caller. `pin`: CPUs to pin workers (and nothing for the caller) to; empty for none.
  explicit Pool(int threads, std::vector<int> pin = {});
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }
  // How often a held-up worker was brought to the caller's core, and how often a worker went away from there, so far.
  int64_t pulled() const { return pulled_.load(std::memory_order_relaxed); }
  int64_t left() const { return left_.load(std::memory_order_relaxed); }
  // How often a worker that missed loops was sent to other cores than the caller's.
  int64_t pushed() const { return pushed_.load(std::memory_order_relaxed); }

  // Run body(item, thread) for every item in [0, items). Returns when all are done. Not reentrant.
  template <class F>
  void run(int64_t items, F&& body) {
    if (items <= 0) return;
    if (threads_ == 1 || items == 1) {
      for (int64_t i = 0; i < items; i++) body(i, 0);
      return;
    }
    using Body = std::remove_reference_t<F>;
    start([](void* ctx, int64_t item, int thread) { (*static_cast<Body*>(ctx))(item, thread); },
          const_cast<void*>(static_cast<const void*>(&body)), items);
  }

 private:
  using Call = void (*)(void*, int64_t, int);
  void start(Call call, void* ctx, int64_t items);
  void worker(int index);
  void work(int thread);
  void wait_for_items();
  bool pull_one();
  void leave_callers_core(int index);
  void push_absent();

  int threads_;
  std::vector<std::thread> workers_;
  // One loop at a time. `open_` is the loop's number while it may be joined, 0 otherwise; the fields below are written
  // before it is raised and stay until `active_` (workers inside the loop) is back to 0. A worker that never joined is
  // not waited for, so one that has lost its core delays nobody.
  struct alignas(64) Share {
    std::atomic<int64_t> next{0};
    int64_t end = 0;
    std::atomic<bool> inside{false};  // the thread may hold an item
    std::atomic<int> id{0};           // of the system, 0 if it cannot be moved
    std::atomic<bool> asleep{false};
    std::atomic<uint64_t> joined{0};  // the last loop that the thread took part in
  };
  Call call_ = nullptr;
  void* ctx_ = nullptr;
  uint64_t loops_ = 0;
  std::vector<Share> shares_;  // one per thread
  alignas(64) std::atomic<uint64_t> open_{0};
  alignas(64) std::atomic<int> active_{0};
  alignas(64) std::atomic<int> sleeping_{0};
  std::mutex mutex_;
  std::condition_variable wake_;
  std::atomic<bool> stop_{false};
  const bool movable_;
  std::mutex moving_;  // who is moved must not be moved by another meanwhile: each puts back the CPUs that were allowed before
  alignas(64) std::atomic<int> caller_core_{-1};
  std::atomic<bool> caller_sleeps_{false};
  std::condition_variable done_;
  std::atomic<int64_t> pulled_{0}, left_{0}, pushed_{0};
};

}  // namespace headrace
