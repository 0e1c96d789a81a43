#include "cpu/run_failures.h"

#include <algorithm>
#include <thread>

#include "cpu/hand_over.h"
#include "cpu/process_context.h"
#include "recorder/recorder.h"

namespace jaxcomm {

RunFailures& RunFailures::Get() {
  static auto* failures = new RunFailures;
  return *failures;
}

RunFailures::RunFailures() {
  std::thread([this] { CheckForever(); }).detach();
}

void RunFailures::Watch(const std::shared_ptr<OpenCalls>& calls) {
  std::lock_guard<std::mutex> lock(mutex_);
  watched_.push_back(calls);
}

void RunFailures::Fail(int64_t run_id, const Status& error) {
  // The failure is recorded before the open calls fail. So a device that arrives in between gets the error.
  bool first = false;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto is_run = [&](const auto& entry) { return entry.first == run_id; };
    first = std::none_of(failed_.begin(), failed_.end(), is_run);
    if (first) {  // the first error is the cause
      failed_.emplace_back(run_id, error);
      if (failed_.size() > 16) failed_.pop_front();
      any_failed_.store(true, std::memory_order_release);
      Recorder::Get().AddError(run_id, error.message());
    }
  }
  ProcessContext& process = ProcessContext::Get();
  if (process.index() >= 0) {
    if (first) process.PublishFailure(run_id, error.message());
    process.progress_thread().FailRun(run_id, error);
  }
  for (const auto& calls : Watched()) calls->FailCalls(run_id, error);
  AtHandOver(HandOver::kCallsFailed);
}

Status RunFailures::Find(int64_t run_id) {
  if (!any_failed_.load(std::memory_order_acquire)) return OkStatus();
  std::lock_guard<std::mutex> lock(mutex_);
  for (const auto& [failed, error] : failed_) {
    if (failed == run_id) return error;
  }
  return OkStatus();
}

std::vector<std::shared_ptr<OpenCalls>> RunFailures::Watched() {
  std::vector<std::shared_ptr<OpenCalls>> alive;
  std::lock_guard<std::mutex> lock(mutex_);
  const auto expired = [](const std::weak_ptr<OpenCalls>& calls) { return calls.expired(); };
  watched_.erase(std::remove_if(watched_.begin(), watched_.end(), expired), watched_.end());
  for (const auto& calls : watched_) {
    if (auto locked = calls.lock()) alive.push_back(std::move(locked));
  }
  return alive;
}

void RunFailures::CheckForever() {
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    const auto now = std::chrono::steady_clock::now();
    for (const auto& calls : Watched()) {
      for (const auto& [run_id, error] : calls->CheckWaits(now)) Fail(run_id, error);
    }
  }
}

}  // namespace jaxcomm
