// Threads that help with large copies and reductions. They only compute: none ever waits for a device, so work that one
// has begun always ends.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>

namespace jaxcomm {

// Below this much data one thread is done before a helper is awake.
constexpr int64_t kHelpBytes = 1 << 20;

class Helpers {
 public:
  // One thread less than processors. Never destroyed, like the Completer.
  static Helpers& Get();

  int64_t num_threads() const { return num_threads_; }
  // Lets up to `num_helpers` threads call `work` once each, soon or never.
  void Offer(int64_t num_helpers, const std::function<void()>& work);

 private:
  Helpers();
  void Run();

  int64_t num_threads_;
  std::mutex mutex_;
  std::condition_variable offered_;
  std::deque<std::function<void()>> queue_;
};

}  // namespace jaxcomm
