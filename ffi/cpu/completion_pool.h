// Completes the promises of waiting devices when their collective is done.
//
// On XLA:CPU, completing the promise of a device runs the rest of that device's program on the calling thread, until
// the program next waits. The thread may block there inside one of XLA's own collectives until another device arrives.
// Hence three rules: a handler completes only its own promise (nothing waits on that yet), all other promises go
// through this pool, and the pool has at least as many threads as there are local devices.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "common/status.h"

namespace jaxcomm {

// The promise of one device. Either Succeed or Fail is called, once, with no lock held.
class Completion {
 public:
  virtual ~Completion() = default;
  virtual void Succeed() = 0;
  virtual void Fail(const Status& error) = 0;
};

// How long programs run after this call site before they next wait: a moving average.
struct Pace {
  std::atomic<int64_t> continuation_ns{0};
};

class CompletionPool {
 public:
  struct Item {
    std::unique_ptr<Completion> completion;
    std::shared_ptr<Pace> pace;  // null if `status` is an error
    Status status;
  };

  // Never destroyed: threads may still be inside XLA when static destructors run.
  static CompletionPool& Get();

  void EnsureThreads(int64_t num_threads);
  void Push(std::vector<Item> items);

 private:
  using Clock = std::chrono::steady_clock;

  CompletionPool();
  void Run();
  void WakeBlockedQueue();
  static void Complete(Item item);

  std::mutex mutex_;
  std::condition_variable work_;     // threads
  std::condition_variable pending_;  // watchdog
  std::deque<Item> queue_;
  int64_t num_threads_ = 0;
  int64_t num_idle_ = 0;
  bool watchdog_idle_ = false;
};

}  // namespace jaxcomm
