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

#include "xla/ffi/api/ffi.h"
#include "xla_collectives_abi.h"

namespace jaxcomm {

// Lives no longer than the handler's call.
class XlaCollectives {
 public:
  XlaCollectives(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context);

  // `groups`: logical device ids, group after group. Both return an empty string, or what is wrong.
  //
  // Stage Prepare: XLA will have the communicator of this device's group ready when the stage Initialize comes.
  std::string Request(const std::vector<int64_t>& groups, int64_t group_size) const;
  // Stages Initialize and Execute: `*communicator` is an ncclComm_t on CUDA, owned by XLA.
  std::string Get(const std::vector<int64_t>& groups, int64_t group_size, void** communicator) const;

 private:
  std::string TakeText(XLA_FFI_Error* error) const;

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
