// This process among the others: who there is, and what reaches them.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../common/status.h"
#include "../transport/node.h"
#include "../transport/open_network.h"
#include "cost_params.h"
#include "progress.h"
#include "switchboard.h"

namespace jaxcomm {

// What a process tells the others before they work together.
struct ProcessInfo {
  std::string node;          // processes with equal names share memory
  NodeAddress address;       // for those
  bool single_copy = false;  // others may read its memory, and it theirs
  int64_t num_processors = 1;
};

class ThisProcess {
 public:
  static ThisProcess& Get();  // never destroyed: threads may still run when static destructors do

  // `index` is JAX's. Starting again does nothing.
  Status Start(int32_t index, const std::string& node, bool allow_single_copy);
  // To processes of other nodes, the network has to be connected too.
  Status Connect(int32_t index, const ProcessInfo& info);
  // Makes this process reachable from other nodes. Starting again does nothing.
  Status StartNetwork(const NetworkOptions& options, int32_t num_processes, uint64_t token);
  Status ConnectNetwork(int32_t index, const std::string& address);

  int32_t index() const { return index_; }  // -1: not started
  const ProcessInfo& info() const { return info_; }
  Node& node() { return node_; }
  Progress& progress() { return *progress_; }
  Switchboard& switchboard() { return switchboard_; }
  bool connected(int32_t index);

  // What all of these processes can do, and on which node each is: numbers from 0 on, in order of appearance.
  Host HostOf(const std::vector<int32_t>& processes, bool* single_copy, std::vector<int32_t>* node_of);
  // Tells the others why this process has given up a run.
  void PublishFailure(int64_t run, const std::string& why);

 private:
  int32_t index_ = -1;
  ProcessInfo info_;
  Node node_;
  Switchboard switchboard_;
  std::unique_ptr<Progress> progress_;
  std::mutex mutex_;
  std::map<int32_t, ProcessInfo> others_;
};

}  // namespace jaxcomm
