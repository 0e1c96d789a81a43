// Runs that have failed. When one call of a run fails, all calls of the run fail, in this process and in the others.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "common/status.h"

namespace jaxcomm {

// Calls that wait for participants.
class OpenCalls {
 public:
  virtual ~OpenCalls() = default;
  virtual void FailCalls(int64_t run_id, const Status& error) = 0;
  // Prints the warnings that are due. Returns each run with a call whose time limit has passed, and the error.
  virtual std::vector<std::pair<int64_t, Status>> CheckWaits(std::chrono::steady_clock::time_point now) = 0;
};

// Thread-safe.
class RunFailures {
 public:
  static RunFailures& Get();  // never destroyed: its thread runs until the process ends

  // From now on, these calls fail with their run and at their time limit.
  void Watch(const std::shared_ptr<OpenCalls>& calls);
  // Fails the open and later calls of a run at all call sites, also in other processes.
  void Fail(int64_t run_id, const Status& error);
  // The first error of the run; success if it has not failed. Only the last 16 failed runs are known.
  Status Find(int64_t run_id);

 private:
  RunFailures();
  void CheckForever();
  std::vector<std::shared_ptr<OpenCalls>> Watched();

  std::mutex mutex_;
  std::vector<std::weak_ptr<OpenCalls>> watched_;
  std::deque<std::pair<int64_t, Status>> failed_;
  std::atomic<bool> any_failed_{false};
};

}  // namespace jaxcomm
