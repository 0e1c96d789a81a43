#include "cpu/process_context.h"

#include <algorithm>

namespace jaxcomm {

ProcessContext& ProcessContext::Get() {
  static auto* process = new ProcessContext;
  return *process;
}

Status ProcessContext::Start(int32_t index, const std::string& node, bool allow_single_copy) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (index_ >= 0) return OkStatus();
  JAXCOMM_RETURN_IF_ERROR(node_.Open());
  info_.node = node;
  info_.address = node_.address();
  info_.single_copy = allow_single_copy && Node::AllowSingleCopy();
  info_.num_processors = NumProcessors();
  progress_thread_ = std::make_unique<ProgressThread>(node_);
  index_ = index;
  return OkStatus();
}

Status ProcessContext::Connect(int32_t index, const ProcessInfo& info) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (index == index_ || others_.count(index) > 0) return OkStatus();
  if (info.node != info_.node) {
    others_.emplace(index, info);
    return OkStatus();
  }
  JAXCOMM_RETURN_IF_ERROR(node_.Connect(index, info.address));
  if (info.single_copy && info_.single_copy) {
    uint64_t token[2] = {};
    const RemoteRead read{reinterpret_cast<char*>(token), reinterpret_cast<const char*>(info.address.token_address),
                          sizeof(token)};
    if (!ReadFromProcess(info.address.pid, &read, 1) || token[0] != info.address.token[0] ||
        token[1] != info.address.token[1]) {
      return UnavailableError("the memory of process " + std::to_string(info.address.pid) +
                              " cannot be read (process_vm_readv); set JAXCOMM_SINGLE_COPY=0 in all processes");
    }
  }
  others_.emplace(index, info);
  return OkStatus();
}

bool ProcessContext::connected(int32_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  return index == index_ || others_.count(index) > 0;
}

Status ProcessContext::StartNetwork(const UcxOptions& options, int32_t num_processes, uint64_t token) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (active_messages_.network() != nullptr) return OkStatus();
  StatusOr<std::unique_ptr<Network>> network = OpenUcxNetwork(options, index_, num_processes, token, &active_messages_);
  if (!network.ok()) return network.status();
  active_messages_.SetNetwork(*std::move(network));
  return OkStatus();
}

Status ProcessContext::ConnectNetwork(int32_t index, const std::string& address) {
  return active_messages_.network()->Connect(index, address);
}

NodeResources ProcessContext::ResourcesOf(const std::vector<int32_t>& processes, bool* single_copy,
                                          std::vector<int32_t>* node_of) {
  std::lock_guard<std::mutex> lock(mutex_);
  NodeResources resources;
  resources.num_processors = info_.num_processors;
  *single_copy = info_.single_copy;
  std::vector<std::string> nodes;
  for (const int32_t process : processes) {
    const ProcessInfo& info = process == index_ ? info_ : others_.at(process);
    resources.num_processors = std::min(resources.num_processors, info.num_processors);
    *single_copy &= info.single_copy;
    const auto found = std::find(nodes.begin(), nodes.end(), info.node);
    node_of->push_back(static_cast<int32_t>(found - nodes.begin()));
    if (found == nodes.end()) nodes.push_back(info.node);
  }
  resources.scope = nodes.size() == 1 ? Scope::kNode : Scope::kNetwork;
  return resources;
}

void ProcessContext::PublishFailure(int64_t run_id, const std::string& why) {
  if (!node_.is_open()) return;
  {
    std::lock_guard<std::mutex> lock(node_.control_segment_mutex());
    if (!node_.control_segment().FindFailure(run_id)) node_.control_segment().AddFailure(run_id, why);
  }
  std::lock_guard<std::mutex> lock(mutex_);
  if (active_messages_.network() == nullptr) return;
  for (const auto& [index, info] : others_) {
    if (info.node != info_.node) active_messages_.SendRunFailed(index, run_id, why);
  }
}

}  // namespace jaxcomm
