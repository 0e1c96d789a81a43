// Worker threads for large copies and reductions. They only compute and never wait for a device, so work that has begun
// always ends.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

namespace jaxcomm {

// With less data, one thread finishes before a worker is awake.
constexpr int64_t kMinParallelBytes = 1 << 20;

class WorkerPool {
 public:
  // One thread fewer than processors. Never destroyed, like the CompletionPool.
  static WorkerPool& Get();

  int64_t num_threads() const { return num_threads_; }
  // Queues `work` for up to `num_workers` threads, which each call it once. Returns at once.
  void Submit(int64_t num_workers, const std::function<void()>& work);
  // Queues `work` for one thread, also on a machine with one processor.
  void SubmitOnce(std::function<void()> work);

 private:
  WorkerPool();
  void Run();

  const int64_t num_threads_;
  bool has_thread_;
  std::mutex mutex_;
  std::condition_variable submitted_;
  std::deque<std::function<void()>> queue_;
};

}  // namespace jaxcomm
