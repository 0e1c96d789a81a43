// Whether a run may go on. Its local devices must all get the same answer: they meet after the stage Initialize, and
// XLA ends the process if some of them have ended in an error there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

namespace jaxcomm {
namespace cuda {

// One per call site and executable.
class RunStatus {
 public:
  // Empty, or why a call before this run has failed: what `find` has said on the first device of the run that asked.
  template <typename F>
  std::string Of(int64_t run_id, F find) {
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
    std::string failure;
  };
  std::mutex mutex_;
  std::deque<Entry> entries_;
};

}  // namespace cuda
}  // namespace jaxcomm
