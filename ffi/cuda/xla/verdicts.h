// Whether a run may go on, which its local devices must all answer alike: they meet after the stage Initialize, and XLA
// ends the process if some of them have ended in an error there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <string>

namespace jaxcomm {
namespace cuda {

// One per call site and executable.
class Verdicts {
 public:
  // Empty, or why a call before this run has failed: what `find` has said on the first device of the run that asked.
  template <typename F>
  std::string Of(int64_t run, F find) {
    constexpr size_t kRunsUnderWay = 8;
    std::lock_guard<std::mutex> lock(mutex_);
    for (const Verdict& verdict : verdicts_) {
      if (verdict.run == run) return verdict.failure;
    }
    verdicts_.push_back({run, find()});
    if (verdicts_.size() > kRunsUnderWay) verdicts_.pop_front();
    return verdicts_.back().failure;
  }

 private:
  struct Verdict {
    int64_t run = 0;
    std::string failure;
  };
  std::mutex mutex_;
  std::deque<Verdict> verdicts_;
};

}  // namespace cuda
}  // namespace jaxcomm
