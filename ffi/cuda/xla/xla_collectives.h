// XLA's own communicator, for an FFI handler.
//
// XLA orders the ranks of a clique like the ids in the group, and the clique's n-th rank is NCCL's rank n. So the rank
// in the communicator is the position in the group. (openxla/xla: GetParticipatingDevices in
// xla/service/collective_ops_utils.cc, CliqueKey::rank in xla/core/collectives/clique_key.cc.)
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cuda/program/assign_or_return.h"
#include "cuda/xla/xla_collectives_abi.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

// Groups of a call in the form that XLA takes. Made once, because 100,000 GPUs may form 12,500 groups, too many to
// convert in every run.
class DeviceGroups {
 public:
  // `ids`: logical device ids, group after group. Must outlive this object and not move.
  DeviceGroups(const std::vector<int64_t>& ids, int64_t group_size);

  const std::vector<xla_abi::ReplicaGroup>& split() const { return split_; }

 private:
  std::vector<xla_abi::ReplicaGroup> split_;
};

// Valid only during the call of the handler.
class XlaCollectives {
 public:
  struct Buffer {
    const void* address = nullptr;
    int64_t bytes = 0;
  };
  // A window that a buffer lies in.
  struct Window {
    void* window = nullptr;  // an ncclWindow_t on CUDA
    int64_t offset = 0;      // of the buffer, in bytes; may differ between ranks
  };

  XlaCollectives(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context);

  // Stage Prepare: asks XLA to have the communicator of this device's group ready for the stage Initialize.
  Status Request(const DeviceGroups& groups) const;
  // Stages Initialize and Execute: the communicator, on CUDA an ncclComm_t. Owned by XLA.
  StatusOr<void*> Get(const DeviceGroups& groups) const;

  // Windows on XLA's own buffers, which must lie in XLA's collective memory. All ranks of the group must request
  // windows on the same operands and results of the same calls, because XLA registers them together. An address outside
  // of XLA's buffers is an error here. An address in other memory of XLA is a later error of the whole run.
  //
  // Stage Prepare, after Request(). A buffer that is listed twice is requested once, and an empty one is not requested.
  Status RequestWindows(const DeviceGroups& groups, const std::vector<Buffer>& buffers) const;
  // Stages Initialize and Execute. The window is owned by XLA and valid only in this run.
  StatusOr<Window> GetWindow(const DeviceGroups& groups, const void* buffer) const;

 private:
  // Destroys `error`.
  Status Error(const char* prefix, XLA_FFI_Error* error) const;
  StatusOr<const xla_abi::CollectivesWithWindows*> WithWindows() const;

  const XLA_FFI_Api* api_;
  const xla_abi::Collectives* extension_ = nullptr;
  Status missing_;  // why extension_ is null
};

}  // namespace jaxcomm

// Found anew for each call: .Ctx<XlaCollectives>(). A runtime without the extension is no error here, so that the error
// of Request() can name the packages to install.
template <>
struct xla::ffi::CtxDecoding<jaxcomm::XlaCollectives> {
  using Type = jaxcomm::XlaCollectives;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context, DiagnosticEngine&) {
    return jaxcomm::XlaCollectives(api, context);
  }
};
