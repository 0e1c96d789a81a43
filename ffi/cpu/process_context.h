// The context of this process: its node, its connections, its progress thread.
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
#include "active_messages.h"
#include "cost_params.h"
#include "progress_thread.h"

namespace jaxcomm {

// Published by a process before others work with it.
struct ProcessInfo {
  std::string node;          // processes with equal names share memory
  NodeAddress address;       // for those
  bool single_copy = false;  // others may read its memory, and it theirs
  int64_t num_processors = 1;
};

class ProcessContext {
 public:
  static ProcessContext& Get();  // never destroyed: threads may still run when static destructors do

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
  ProgressThread& progress_thread() { return *progress_thread_; }
  ActiveMessages& active_messages() { return active_messages_; }
  bool connected(int32_t index);

  // What all of these processes can do, and on which node each is: numbers from 0 on, in order of appearance.
  NodeResources ResourcesOf(const std::vector<int32_t>& processes, bool* single_copy, std::vector<int32_t>* node_of);
  // Publishes why this process has aborted a run.
  void PublishFailure(int64_t run_id, const std::string& why);

 private:
  int32_t index_ = -1;
  ProcessInfo info_;
  Node node_;
  ActiveMessages active_messages_;
  std::unique_ptr<ProgressThread> progress_thread_;
  std::mutex mutex_;
  std::map<int32_t, ProcessInfo> others_;
};

}  // namespace jaxcomm
