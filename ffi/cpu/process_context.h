// The context of this process: its node, its connections, its progress thread.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/status.h"
#include "cpu/active_messages.h"
#include "cpu/cost_params.h"
#include "cpu/progress_thread.h"
#include "transport/node.h"
#include "transport/ucx_network.h"

namespace jaxcomm {

// Published by each process so that others can connect to it.
struct ProcessInfo {
  std::string node;          // processes with equal names share memory
  NodeAddress address;       // for processes of the same node
  bool single_copy = false;  // supports remote reads, in both directions
  int64_t num_processors = 1;
};

class ProcessContext {
 public:
  static ProcessContext& Get();  // never destroyed: threads may still run when static destructors do

  // `index` is JAX's process index. A second call does nothing.
  Status Start(int32_t index, const std::string& node, bool allow_single_copy);
  // A process of another node also needs ConnectNetwork.
  Status Connect(int32_t index, const ProcessInfo& info);
  // Makes this process reachable from other nodes. A second call does nothing.
  Status StartNetwork(const UcxOptions& options, int32_t num_processes, uint64_t token);
  Status ConnectNetwork(int32_t index, const std::string& address);

  int32_t index() const { return index_; }  // -1: not started
  const ProcessInfo& info() const { return info_; }
  Node& node() { return node_; }
  ProgressThread& progress_thread() { return *progress_thread_; }
  ActiveMessages& active_messages() { return active_messages_; }
  bool connected(int32_t index);

  // The resources that all of these processes have in common. `single_copy`: all support remote reads. `node_of`: the
  // node of each process, numbered from 0 in order of appearance.
  NodeResources ResourcesOf(const std::vector<int32_t>& processes, bool* single_copy, std::vector<int32_t>* node_of);
  // Publishes the error that made this process abort a run, in its node and to the connected processes of others.
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
