#include "cpu/completion_pool.h"

#include <algorithm>
#include <thread>
#include <utility>

namespace jaxcomm {
namespace {

// The cost of waking a sleeping thread (futex wake to first instruction: 26 us, AMD EPYC guest, 2026-11). Another
// thread pays off only if the queued programs keep one thread busy for longer.
constexpr int64_t kWakeNs = 30'000;

thread_local bool in_pool = false;

}  // namespace

CompletionPool& CompletionPool::Get() {
  static auto* pool = new CompletionPool;
  return *pool;
}

CompletionPool::CompletionPool() {
  std::thread([this] { WakeBlockedQueue(); }).detach();
}

void CompletionPool::EnsureThreads(int64_t num_threads) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (; num_threads_ < num_threads; ++num_threads_) std::thread([this] { Run(); }).detach();
}

void CompletionPool::Push(std::vector<Item> items) {
  if (items.empty()) return;
  // A thread of the pool returns to the queue by itself. Any other thread must wake one.
  int64_t wake = in_pool ? 0 : 1;
  if (items.front().pace) {
    const int64_t serial_ns =
        items.front().pace->continuation_ns.load(std::memory_order_relaxed) * static_cast<int64_t>(items.size());
    wake += serial_ns / kWakeNs;
  }
  bool wake_watchdog;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    wake = std::min({wake, num_idle_, static_cast<int64_t>(items.size())});
    for (Item& item : items) queue_.push_back(std::move(item));
    wake_watchdog = watchdog_idle_;
    watchdog_idle_ = false;
  }
  for (; wake > 0; --wake) work_.notify_one();
  if (wake_watchdog) pending_.notify_one();
}

void CompletionPool::Run() {
  in_pool = true;
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    while (queue_.empty()) {
      ++num_idle_;
      work_.wait(lock);
      --num_idle_;
    }
    Item item = std::move(queue_.front());
    queue_.pop_front();
    lock.unlock();
    Complete(std::move(item));
    lock.lock();
  }
}

void CompletionPool::Complete(Item item) {
  if (!item.status.ok()) {
    item.completion->Fail(item.status);
    return;
  }
  const Clock::time_point start = Clock::now();
  item.completion->Succeed();
  const int64_t ns = std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count();
  const int64_t old = item.pace->continuation_ns.load(std::memory_order_relaxed);
  item.pace->continuation_ns.store(old + (ns - old) / 8, std::memory_order_relaxed);
}

// Wakes all threads if items are still queued after 0.5 ms. The thread that should have taken them is busy or blocked,
// perhaps on one of these items.
void CompletionPool::WakeBlockedQueue() {
  std::unique_lock<std::mutex> lock(mutex_);
  for (;;) {
    while (queue_.empty()) {
      watchdog_idle_ = true;  // set on every pass: Push clears it, and its items may be gone already
      pending_.wait(lock);
    }
    watchdog_idle_ = false;
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::microseconds(500));
    lock.lock();
    if (!queue_.empty()) work_.notify_all();
  }
}

}  // namespace jaxcomm
