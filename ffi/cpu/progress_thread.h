// The thread that moves calls on whose handlers have stopped spinning. Sleeps while nothing happens.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "inter_process_call.h"

namespace jaxcomm {

class ProgressThread {
 public:
  explicit ProgressThread(Node& node);  // starts the thread; it ends with the process, or with Stop()

  void Add(std::shared_ptr<InterProcessCall> call);
  // Fails all calls of a run.
  void FailRun(int64_t run_id, const Status& error);
  // Returns when the thread has ended. Calls in flight stay where they are.
  void Stop();

 private:
  void Run();

  Node& node_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<InterProcessCall>> added_;
  std::vector<std::shared_ptr<InterProcessCall>> calls_;  // what the thread works on, for FailRun
  bool stop_ = false;
  bool stopped_ = false;
};

}  // namespace jaxcomm
