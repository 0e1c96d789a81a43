// The end of a wait on the host.
#pragma once

#include <chrono>
#include <thread>

#include "common/duration.h"

namespace jaxcomm {

class Deadline {
 public:
  explicit Deadline(double seconds) : end_(std::chrono::steady_clock::now() + DurationOf(seconds)) {}

  // Sleeps for a short while. False, at once, after the deadline.
  bool Wait() const {
    if (IsOver()) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
    return true;
  }

  bool IsOver() const { return std::chrono::steady_clock::now() > end_; }

 private:
  const std::chrono::steady_clock::time_point end_;
};

}  // namespace jaxcomm
