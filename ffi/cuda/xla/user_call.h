// Calls of targets with handlers of a user: the stages Instantiate and Prepare, which all targets share; a wrapper of
// the user's Initialize; and the function table behind jaxcomm/host.h, which gives the user's stages access to the
// group's communicator.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/program/assign_or_return.h"
#include "cuda/runtime/buffer_places.h"
#include "cuda/runtime/call_names.h"
#include "cuda/xla/call_site.h"
#include "include/jaxcomm/host_api.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

// The attribute `jaxcomm` of jaxcomm.ffi_call. Arrays are attributes of their own: `jaxcomm_groups`;
// `jaxcomm_processes` where the lowering knows the mesh's devices; `jaxcomm_operand_windows` and
// `jaxcomm_result_windows`, numbers of buffers, if there are any; and `jaxcomm_no_windows`, a text, if the lowering
// could not place these buffers in memory that can have windows.
struct UserCallAttributes {
  std::string_view target;
  std::string_view site;
  int64_t group_size;
  int64_t max_sms;  // 0: no limit but the communicator's
};

namespace cuda {

struct UserCallState;

// A user's call on one device.
struct UserCall {
  Communicator& communicator() const { return *own_communicator; }
  bool HasOneNode() const { return comm.local.size == comm.world.size; }

  const UserCallState* state = nullptr;
  Communicator* own_communicator = nullptr;
  std::shared_ptr<const CallName> name;
  device::Comm comm;
  int32_t max_channels = 0;
  // Once Initialize has called UseGin.
  const ncclDevComm* nccl_comm = nullptr;
  device::GinHandle gin;
  std::unique_ptr<BufferPlaces> places;         // null if peers can't address the buffers
  std::string no_windows;                       // the reason
  std::vector<XlaCollectives::Buffer> buffers;  // that have windows, in this run
};

// One per call site and executable, shared by the local devices. `spec` has the target as op. A problem of a device is
// the error of the user's Initialize, which is not called again.
struct UserCallState : CallSite<UserCall> {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  std::vector<int64_t> operand_windows, result_windows;  // numbers of operands and results
  std::string no_windows;                                // why none is requested
  XLA_FFI_Handler* initialize = nullptr;                 // the user's
  // By local device: a hash of the types and shapes of operands and results, and of the attributes.
  std::map<int32_t, uint64_t> arguments;
  std::map<int32_t, std::vector<XlaCollectives::Buffer>> buffers;  // by local device: those of the windows, in this run
  Status requested;                                                // why XLA has refused a request for windows
};

// Sets the user's handler for Initialize, for calls of the target that XLA instantiates from now on.
void SetUserInitialize(const std::string& target, XLA_FFI_Handler* initialize);

const host::Api& HostApi();

}  // namespace cuda
}  // namespace jaxcomm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxcomm::UserCallAttributes, ::xla::ffi::StructMember<std::string_view>("target"),
                                      ::xla::ffi::StructMember<std::string_view>("site"),
                                      ::xla::ffi::StructMember<int64_t>("group_size"),
                                      ::xla::ffi::StructMember<int64_t>("max_sms"));

extern "C" {
XLA_FFI_Error* CudaUserInstantiate(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaUserPrepare(XLA_FFI_CallFrame*);
XLA_FFI_Error* CudaUserInitialize(XLA_FFI_CallFrame*);
}
