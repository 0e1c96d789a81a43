// Calls of targets whose handlers are a user's: the stages Instantiate and Prepare, which are the same for all; what
// stands around the user's Initialize; and the table behind jaxcomm/host.h, by which the user's own stages get at the
// group's communicator.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "cuda/runtime/call_names.h"
#include "cuda/runtime/communicator.h"
#include "cuda/xla/run_status.h"
#include "cuda/xla/xla_collectives.h"
#include "include/jaxcomm/host_api.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

namespace ffi = ::xla::ffi;

// The attribute `jaxcomm` of jaxcomm.ffi_call; the ranks come beside it, as `jaxcomm_groups`.
struct UserCallAttributes {
  std::string_view target;
  std::string_view site;
  int64_t group_size;
  int64_t max_sms;  // 0: as many as the communicator has
};

namespace cuda {

// One per call site and executable, shared by the local devices.
struct UserCallState {
  static ffi::TypeId id;
  static ffi::TypeInfo info;

  struct OnDevice {
    const UserCallState* state = nullptr;
    Communicator* communicator = nullptr;
    std::shared_ptr<const CallName> name;
    device::Comm comm;
    int32_t max_channels = 0;
  };

  std::string Where() const { return "jaxcomm: " + target + " at " + site; }

  std::string target, site;
  std::vector<int64_t> groups;  // logical device ids, group after group
  int64_t group_size = 1;
  std::optional<DeviceGroups> split;  // these
  int64_t max_sms = 0;
  XLA_FFI_Handler* initialize = nullptr;  // the user's
  RunStatus run_status;
  std::mutex mutex;
  std::map<int32_t, OnDevice> calls;        // by local device
  std::map<int32_t, std::string> problems;  // by local device: why Initialize has failed there, and is not called again
};

// The user's handler for Initialize in the calls of a target that XLA instantiates from now on.
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
