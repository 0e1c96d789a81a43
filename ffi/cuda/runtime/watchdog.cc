#include "cuda/runtime/watchdog.h"

#include <chrono>
#include <cstdio>
#include <mutex>
#include <utility>

#include "cuda/nccl/threads.h"
#include "cuda/runtime/communicator.h"
#include "recorder/recorder.h"

namespace jaxcomm::cuda {
namespace {

void Watch(const std::function<void()>& end, double grace_s) {
  constexpr std::chrono::milliseconds kPoll(50);
  bool goes_on = true;
  Status failure;
  while (goes_on && failure.ok()) {
    goes_on = Threads::Sleep(kPoll);  // after the last sleep, one more look
    Communicator::RecordProgress();
    failure = Communicator::FirstFailure();
  }
  if (failure.ok()) return;
  Recorder::Get().AddError(0, failure.message());
  std::fprintf(stderr, "jaxcomm: %s. This process has lost its GPU and ends within %g s\n", failure.message().c_str(),
               grace_s);
  const auto last = std::chrono::steady_clock::now() + std::chrono::duration<double>(grace_s);
  while (std::chrono::steady_clock::now() < last) {
    if (!Threads::Sleep(kPoll)) return;  // the process ends already
  }
  end();
}

}  // namespace

void StartWatchdog(std::function<void()> end, double grace_s) {
  static std::once_flag started;
  std::call_once(started, [&] { Threads::Start([end = std::move(end), grace_s] { Watch(end, grace_s); }); });
}

}  // namespace jaxcomm::cuda
