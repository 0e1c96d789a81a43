// The thread that advances calls whose handlers have stopped spinning. It sleeps while no call can advance.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "cpu/inter_process_call.h"

namespace jaxcomm {

class ProgressThread {
 public:
  explicit ProgressThread(Node& node);  // starts the thread, which runs until Stop() or the end of the process

  void Add(std::shared_ptr<InterProcessCall> call);
  // Fails all calls of a run.
  void FailRun(int64_t run_id, const Status& error);
  // Returns when the thread has ended. Calls in flight do not advance any more.
  void Stop();

 private:
  void Run();

  Node& node_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<InterProcessCall>> added_;
  std::vector<std::shared_ptr<InterProcessCall>> calls_;  // advanced by the thread; guarded for FailRun
  bool stop_ = false;
  bool stopped_ = false;
};

}  // namespace jaxcomm
