#include "this_process.h"

#include <algorithm>

namespace jaxcomm {

ThisProcess& ThisProcess::Get() {
  static auto* process = new ThisProcess;
  return *process;
}

Status ThisProcess::Start(int32_t index, const std::string& node, bool allow_single_copy) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (index_ >= 0) return OkStatus();
  JAXCOMM_RETURN_IF_ERROR(node_.Open());
  info_.node = node;
  info_.address = node_.address();
  info_.single_copy = allow_single_copy && Node::AllowSingleCopy();
  info_.num_processors = NumProcessors();
  progress_ = std::make_unique<Progress>(node_);
  index_ = index;
  return OkStatus();
}

Status ThisProcess::Connect(int32_t index, const ProcessInfo& info) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (index == index_ || others_.count(index) > 0) return OkStatus();
  if (info.node != info_.node) {
    others_.emplace(index, info);
    return OkStatus();
  }
  JAXCOMM_RETURN_IF_ERROR(node_.Connect(index, info.address));
  if (info.single_copy && info_.single_copy) {
    uint64_t token[2] = {};
    const Piece piece{reinterpret_cast<char*>(token), reinterpret_cast<const char*>(info.address.token_address),
                      sizeof(token)};
    if (!ReadFromProcess(info.address.pid, &piece, 1) || token[0] != info.address.token[0] ||
        token[1] != info.address.token[1]) {
      return UnavailableError("the memory of process " + std::to_string(info.address.pid) +
                              " can't be read (process_vm_readv); set JAXCOMM_SINGLE_COPY=0 in all processes");
    }
  }
  others_.emplace(index, info);
  return OkStatus();
}

bool ThisProcess::connected(int32_t index) {
  std::lock_guard<std::mutex> lock(mutex_);
  return index == index_ || others_.count(index) > 0;
}

Status ThisProcess::StartNetwork(const NetworkOptions& options, int32_t num_processes, uint64_t token) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (switchboard_.network() != nullptr) return OkStatus();
  StatusOr<std::unique_ptr<Network>> network = OpenNetwork(options, index_, num_processes, token, &switchboard_);
  if (!network.ok()) return network.status();
  switchboard_.SetNetwork(*std::move(network));
  return OkStatus();
}

Status ThisProcess::ConnectNetwork(int32_t index, const std::string& address) {
  return switchboard_.network()->Connect(index, address);
}

Host ThisProcess::HostOf(const std::vector<int32_t>& processes, bool* single_copy, std::vector<int32_t>* node_of) {
  std::lock_guard<std::mutex> lock(mutex_);
  Host host;
  host.num_processors = info_.num_processors;
  *single_copy = info_.single_copy;
  std::vector<std::string> nodes;
  for (const int32_t process : processes) {
    const ProcessInfo& info = process == index_ ? info_ : others_.at(process);
    host.num_processors = std::min(host.num_processors, info.num_processors);
    *single_copy &= info.single_copy;
    const auto found = std::find(nodes.begin(), nodes.end(), info.node);
    node_of->push_back(static_cast<int32_t>(found - nodes.begin()));
    if (found == nodes.end()) nodes.push_back(info.node);
  }
  host.reach = nodes.size() == 1 ? Reach::kNode : Reach::kNetwork;
  return host;
}

void ThisProcess::PublishFailure(int64_t run, const std::string& why) {
  if (!node_.is_open()) return;
  std::lock_guard<std::mutex> lock(node_.board_mutex());
  if (!node_.board().FindFailure(run)) node_.board().AddFailure(run, why);
}

}  // namespace jaxcomm
