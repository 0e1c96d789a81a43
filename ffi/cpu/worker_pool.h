// Worker threads for large copies and reductions. They only compute: none ever waits for a device, so work that one
// has begun always ends.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

namespace jaxcomm {

// Below this much data one thread is done before a worker is awake.
constexpr int64_t kMinParallelBytes = 1 << 20;

class WorkerPool {
 public:
  // One thread less than processors. Never destroyed, like the CompletionPool.
  static WorkerPool& Get();

  int64_t num_threads() const { return num_threads_; }
  // Lets up to `num_workers` threads call `work` once each, soon or never.
  void Submit(int64_t num_workers, const std::function<void()>& work);

 private:
  WorkerPool();
  void Run();

  int64_t num_threads_;
  std::mutex mutex_;
  std::condition_variable submitted_;
  std::deque<std::function<void()>> queue_;
};

}  // namespace jaxcomm
