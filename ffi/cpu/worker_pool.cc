#include "cpu/worker_pool.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace jaxcomm {

WorkerPool& WorkerPool::Get() {
  static auto* pool = new WorkerPool;
  return *pool;
}

WorkerPool::WorkerPool()
    : num_threads_(std::max<int64_t>(std::thread::hardware_concurrency(), 1) - 1), has_thread_(num_threads_ > 0) {
  for (int64_t i = 0; i < num_threads_; ++i) std::thread([this] { Run(); }).detach();
}

void WorkerPool::Submit(int64_t num_workers, const std::function<void()>& work) {
  num_workers = std::min(num_workers, num_threads_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t i = 0; i < num_workers; ++i) queue_.push_back(work);
  }
  for (int64_t i = 0; i < num_workers; ++i) submitted_.notify_one();
}

void WorkerPool::SubmitOnce(std::function<void()> work) {
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!has_thread_) std::thread([this] { Run(); }).detach();
    has_thread_ = true;
    queue_.push_back(std::move(work));
  }
  submitted_.notify_one();
}

void WorkerPool::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    submitted_.wait(lock, [this] { return !queue_.empty(); });
    {
      const std::function<void()> work = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      work();
    }
    lock.lock();
  }
}

}  // namespace jaxcomm
