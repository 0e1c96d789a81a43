#include "helpers.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace jaxcomm {

Helpers& Helpers::Get() {
  static auto* helpers = new Helpers;
  return *helpers;
}

Helpers::Helpers() : num_threads_(std::max<int64_t>(std::thread::hardware_concurrency(), 1) - 1) {
  for (int64_t i = 0; i < num_threads_; ++i) std::thread([this] { Run(); }).detach();
}

void Helpers::Offer(int64_t num_helpers, const std::function<void()>& work) {
  num_helpers = std::min(num_helpers, num_threads_);
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (int64_t i = 0; i < num_helpers; ++i) queue_.push_back(work);
  }
  for (int64_t i = 0; i < num_helpers; ++i) offered_.notify_one();
}

void Helpers::Run() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    offered_.wait(lock, [this] { return !queue_.empty(); });
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
