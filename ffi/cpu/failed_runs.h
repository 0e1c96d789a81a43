// Runs that have failed. A device that arrives at a later call of such a run gets the error at once.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <mutex>
#include <utility>

#include "common/status.h"

namespace jaxcomm {

// Thread-safe. Keeps the last 16 runs.
class FailedRuns {
 public:
  void Add(int64_t run_id, const Status& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& entry : runs_) {
      if (entry.first == run_id) return;  // the first error is the cause
    }
    runs_.emplace_back(run_id, error);
    if (runs_.size() > 16) runs_.pop_front();
    any_.store(true, std::memory_order_release);
  }
  // Success if the run has not failed.
  Status Find(int64_t run_id) {
    if (!any_.load(std::memory_order_acquire)) return OkStatus();
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [failed, why] : runs_) {
      if (failed == run_id) return why;
    }
    return OkStatus();
  }

 private:
  std::mutex mutex_;
  std::deque<std::pair<int64_t, Status>> runs_;
  std::atomic<bool> any_{false};
};

}  // namespace jaxcomm
