// XLA's own communicator, for an FFI handler.
//
// XLA orders the ranks of a clique as the ids stand in the group, and the clique's n-th rank is NCCL's rank n: so the
// rank of the communicator is the position in the group. (openxla/xla: GetParticipatingDevices in
// xla/service/collective_ops_utils.cc, CliqueKey::rank in xla/core/collectives/clique_key.cc.)
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "cuda/xla/xla_collectives_abi.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

// Groups of a call as XLA takes them, made once: 100,000 GPUs may be 12,500 groups, too many for every run.
class DeviceGroups {
 public:
  // `ids`: logical device ids, group after group; they must stay where they are.
  DeviceGroups(const std::vector<int64_t>& ids, int64_t group_size);

  int64_t group_size() const { return group_size_; }
  const std::vector<xla_abi::ReplicaGroup>& split() const { return split_; }

 private:
  int64_t group_size_;
  std::vector<xla_abi::ReplicaGroup> split_;
};

// Lives no longer than the handler's call.
class XlaCollectives {
 public:
  struct Buffer {
    const void* address;
    int64_t bytes;
  };

  XlaCollectives(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context);

  // Whether XLA provides communicators at all. If not, everything below says why.
  bool Provides() const { return extension_ != nullptr; }

  // Both return an empty string, or what is wrong.
  //
  // Stage Prepare: XLA will have the communicator of this device's group ready when the stage Initialize comes.
  std::string Request(const DeviceGroups& groups) const;
  // Stages Initialize and Execute: `*communicator` is an ncclComm_t on CUDA, owned by XLA.
  std::string Get(const DeviceGroups& groups, void** communicator) const;

  // Windows on XLA's own buffers, which must lie in XLA's collective memory. All ranks of the group must request those
  // of the same operands and results of the same calls: XLA registers them together. An address in none of XLA's
  // buffers is an error here; one in other memory is an error of the whole run, later.
  //
  // Stage Prepare, after Request.
  std::string RequestWindows(const DeviceGroups& groups, const std::vector<Buffer>& buffers) const;
  // Stages Initialize and Execute: `*window` is an ncclWindow_t on CUDA, owned by XLA; of what is valid after this run
  // nothing is known. The buffer is `*offset` bytes from its begin; other ranks' may be elsewhere in theirs.
  std::string GetWindow(const DeviceGroups& groups, const void* buffer, void** window, int64_t* offset) const;

 private:
  std::string TakeText(XLA_FFI_Error* error) const;
  // Null, and why.
  const xla_abi::CollectivesWithWindows* WithWindows(std::string* problem) const;

  const XLA_FFI_Api* api_;
  const xla_abi::Collectives* extension_ = nullptr;
  std::string missing_;  // why extension_ is null
};

}  // namespace jaxcomm

// Found anew for each call: .Ctx<XlaCollectives>(). A runtime without the extension is no error here, so that Request
// can say what to install.
template <>
struct xla::ffi::CtxDecoding<jaxcomm::XlaCollectives> {
  using Type = jaxcomm::XlaCollectives;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context, DiagnosticEngine&) {
    return jaxcomm::XlaCollectives(api, context);
  }
};
