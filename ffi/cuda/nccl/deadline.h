// The end of a wait on the host.
#pragma once

#include <chrono>
#include <cstdint>
#include <thread>

namespace jaxcomm {

class Deadline {
 public:
  explicit Deadline(double seconds)
      : end_(std::chrono::steady_clock::now() + std::chrono::microseconds(static_cast<int64_t>(seconds * 1e6))) {}

  // False once it is over; else after a short while.
  bool Wait() const {
    if (std::chrono::steady_clock::now() > end_) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    return true;
  }

 private:
  const std::chrono::steady_clock::time_point end_;
};

}  // namespace jaxcomm
