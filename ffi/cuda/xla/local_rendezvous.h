// Where the GPUs of a process meet in the first run of a call, before one of them allocates memory.
//
// Memory that NCCL and CUDA allocate or map may have to wait for kernels that run, also on other GPUs of the process,
// and other threads can't launch kernels meanwhile. A kernel of another group may be waiting for such a launch. XLA's
// own rendezvous do not prevent this: that of a clique has the GPUs of one group only, and that of all local GPUs comes
// after the stage Initialize. So each GPU first waits for its own earlier work, and then for the others to have done
// so.
#pragma once

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "common/duration.h"
#include "common/status.h"
#include "cuda/nccl/wait_for_stream.h"

namespace jaxcomm::cuda {

// The number of GPUs of this process among `processes`, those of a call's devices. 0, which means no rendezvous, if the
// process has fewer GPUs: the program was compiled for other devices.
inline int64_t CountLocal(const std::vector<int32_t>& processes, int32_t process) {
  int num_gpus = 0;
  if (cudaGetDeviceCount(&num_gpus) != cudaSuccess) return 0;
  const auto count = std::count(processes.begin(), processes.end(), process);
  return count <= num_gpus ? count : 0;
}

// One per call site and executable.
class LocalRendezvous {
 public:
  // Waits until `num_devices` threads have come for this run, no longer than `limit_s`.
  Status Join(int64_t run_id, int64_t num_devices, double limit_s) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t& num_joined = ++num_joined_[run_id];
    joined_.notify_all();
    const bool met = joined_.wait_for(lock, DurationOf(limit_s), [&] { return num_joined >= num_devices; });
    return met ? OkStatus() : Late(std::to_string(num_devices - num_joined) + " other GPUs of this process", limit_s);
  }

 private:
  std::mutex mutex_;
  std::condition_variable joined_;
  std::map<int64_t, int64_t> num_joined_;  // by run
};

// Whether a run may continue. All local devices of the run must get the same answer: they meet after the stage
// Initialize, and XLA ends the process if only some of them return an error there. One per call site and executable.
class RunStatus {
 public:
  // An error if a call before this run has failed: the result of `find` on the first device of the run.
  template <typename F>
  Status Of(int64_t run_id, F find) {
    constexpr size_t kRunsUnderWay = 8;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Entry& entry : entries_) {
      if (entry.run_id == run_id) return entry.failure;
    }
    entries_.push_back({run_id, find()});
    if (entries_.size() > kRunsUnderWay) entries_.pop_front();
    return entries_.back().failure;
  }

 private:
  struct Entry {
    int64_t run_id = 0;
    Status failure;
  };
  std::mutex mutex_;
  std::deque<Entry> entries_;
};

}  // namespace jaxcomm::cuda
