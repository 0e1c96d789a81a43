#include "cuda/nccl/failed_processes.h"

#include <algorithm>
#include <mutex>
#include <utility>

namespace jaxcomm {
namespace cuda {
namespace {

struct Failed {
  std::mutex mutex;
  std::vector<std::pair<uint64_t, std::string>> reasons;  // in the order of the failures
};

Failed& GetFailed() {
  static auto* failed = new Failed;
  return *failed;
}

}  // namespace

bool SetFailed(uint64_t incarnation, const std::string& why) {
  std::lock_guard<std::mutex> lock(GetFailed().mutex);
  for (const auto& [process, reason] : GetFailed().reasons) {
    if (process == incarnation) return false;
  }
  GetFailed().reasons.emplace_back(incarnation, why);
  return true;
}

Status FailureOf(const std::vector<uint64_t>& processes) {
  std::lock_guard<std::mutex> lock(GetFailed().mutex);
  for (const auto& [process, reason] : GetFailed().reasons) {
    if (processes.empty() || std::find(processes.begin(), processes.end(), process) != processes.end()) {
      return DeadlineExceededError(reason);
    }
  }
  return OkStatus();
}

}  // namespace cuda
}  // namespace jaxcomm
