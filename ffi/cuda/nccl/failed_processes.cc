#include "cuda/nccl/failed_processes.h"

#include <algorithm>
#include <chrono>
#include <mutex>

#include "common/duration.h"

namespace jaxcomm::cuda {
namespace {

using Clock = std::chrono::steady_clock;

struct Reason {
  uint64_t process;
  std::string text;
  bool left;
  Clock::time_point from;
};
struct Failed {
  std::mutex mutex;
  std::vector<Reason> reasons;  // in the order of the failures
};

Failed& GetFailed() {
  static auto* failed = new Failed;
  return *failed;
}

bool Add(const Reason& added) {
  std::lock_guard<std::mutex> lock(GetFailed().mutex);
  for (const Reason& reason : GetFailed().reasons) {
    if (reason.process == added.process) return false;
  }
  GetFailed().reasons.push_back(added);
  return true;
}

}  // namespace

bool SetFailed(uint64_t incarnation, const std::string& why) { return Add({incarnation, why, false, Clock::now()}); }

void SetLeft(uint64_t incarnation, const std::string& why, double grace_s) {
  Add({incarnation, why, true, Clock::now() + DurationOf(grace_s)});
}

Status FailureOf(const std::vector<uint64_t>& processes) {
  std::lock_guard<std::mutex> lock(GetFailed().mutex);
  for (const Reason& reason : GetFailed().reasons) {
    const bool concerns = processes.empty()
                              ? !reason.left
                              : std::find(processes.begin(), processes.end(), reason.process) != processes.end();
    if (concerns && Clock::now() >= reason.from) return DeadlineExceededError(reason.text);
  }
  return OkStatus();
}

}  // namespace jaxcomm::cuda
