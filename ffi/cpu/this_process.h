// This process among those of its host: who else there is, and what reaches them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../transport/node.h"
#include "planner.h"
#include "progress.h"

namespace jaxcomm {

// What a process tells the others before they work together.
struct ProcessInfo {
  NodeAddress address;
  bool single_copy = false;  // others may read its memory, and it theirs
  int64_t num_processors = 1;
};

class ThisProcess {
 public:
  static ThisProcess& Get();  // never destroyed: threads may still run when static destructors do

  // Empty, or what went wrong. `index` is JAX's; starting again does nothing.
  std::string Start(int32_t index, bool allow_single_copy);
  std::string Connect(int32_t index, const ProcessInfo& info);

  int32_t index() const { return index_; }  // -1: not started
  const ProcessInfo& info() const { return info_; }
  Node& node() { return node_; }
  Progress& progress() { return *progress_; }
  bool connected(int32_t index);

  // What all of these processes can do.
  Reach ReachOf(const std::vector<int32_t>& processes, bool* single_copy);
  // Tells the others why this process has given up a run.
  void PublishFailure(int64_t run, const std::string& why);

 private:
  int32_t index_ = -1;
  ProcessInfo info_;
  Node node_;
  std::unique_ptr<Progress> progress_;
  std::mutex mutex_;
  std::map<int32_t, ProcessInfo> others_;
};

}  // namespace jaxcomm
