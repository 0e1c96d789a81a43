// How an XLA FFI handler of your own gets the handle that its kernel needs: .Ctx<jaxcomm::host::Setup>() in the stage
// Initialize, .Ctx<jaxcomm::host::Call>() in Execute. The handlers belong to a target that is registered by
// jaxcomm.register_ffi_target and called by jaxcomm.ffi_call, which bring the stages before and the group's ranks.
//
// Needs XLA's headers, which are in jax.ffi.include_dir(), and nothing of CUDA's.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "host_api.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {
namespace host {

// Of this library alone, whatever else is loaded.
__attribute__((visibility("hidden"))) inline const Api* api_of_library = nullptr;

inline void KeepText(void* sink, const char* text) { *static_cast<std::string*>(sink) = text; }

// The communicator of this call's group, in the stage Initialize. All ranks must come, with their calls in the same
// order; the first run on a device waits for the others. If there is no communicator, if the ranks differ, or if a rank
// does not come within JAXCOMM_TIMEOUT_S, the stage ends with an error. So it does after a failure, as for Call. XLA
// would end a process in which one of several devices does so alone: jaxcomm keeps errors of this stage for Call.
class Setup {
 public:
  explicit Setup(const CallData& data) : data_(data) {}

  // With an arena once there has been a Reserve.
  const device::Comm& comm() const { return data_.comm; }
  // The most thread blocks that the call may launch: JAXCOMM_MAX_SMS, or less if the call says so. The same on all
  // ranks.
  int32_t max_channels() const { return data_.max_channels; }

  // Call::comm().arena will be of `bytes` bytes or more at every rank. It belongs to the target: no kernel but those of
  // its calls on this communicator uses it, it is zero at first, and a call finds what the last one has left. If a call
  // asks for more than there is, a new one takes its place; calls that have the old one keep it.
  //
  // All ranks must come with the same number, in the same order of calls. Memory that a rank does not have, and ranks
  // that ask for different sizes, are an error on all of them; a rank that does not come is one after
  // JAXCOMM_TIMEOUT_S. Takes time at the first run only.
  ::xla::ffi::Error Reserve(int64_t bytes) {
    std::string problem;
    if (api_of_library->reserve(&data_, bytes, &KeepText, &problem)) return ::xla::ffi::Error::Success();
    return ::xla::ffi::Error::InvalidArgument(problem);
  }

 private:
  CallData data_;
};

// The same in the stage Execute, with the arena. If Initialize has failed on this device, the stage ends with its
// error. Once a kernel of this communicator has aborted, it ends with one that names that kernel's call, the rank, and
// the peer that did not signal.
class Call {
 public:
  explicit Call(const CallData& data) : data_(data) {}

  // Passed to the kernel by value. Valid for as long as the process, so that the launch may be part of a CUDA graph.
  const device::Comm& comm() const { return data_.comm; }
  int32_t max_channels() const { return data_.max_channels; }

 private:
  CallData data_;
};

template <typename T>
std::optional<T> Decode(decltype(Api::find) Api::* function, const XLA_FFI_Api* api, void* context,
                        ::xla::ffi::DiagnosticEngine& diagnostic) {
  CallData data;
  std::string problem = "the target has not been registered by jaxcomm.register_ffi_target";
  if (api_of_library && (api_of_library->*function)(api, context, &data, &KeepText, &problem)) return T(data);
  return diagnostic.Emit(problem);
}

}  // namespace host
}  // namespace jaxcomm

// Called by jaxcomm.register_ffi_target. Null, or the version of these headers if they don't fit the table: layouts are
// kept within a minor version.
extern "C" __attribute__((visibility("default"), used)) inline const char* jaxcomm_use_host_api(
    const jaxcomm::host::Api* api) {
  if (api->struct_size < sizeof(jaxcomm::host::Api) || api->call_bytes != sizeof(jaxcomm::host::CallData) ||
      api->version / 100 != JAXCOMM_VERSION / 100) {
    return JAXCOMM_VERSION_TEXT;
  }
  jaxcomm::host::api_of_library = api;
  return nullptr;
}

template <>
struct xla::ffi::CtxDecoding<jaxcomm::host::Setup> {
  using Type = jaxcomm::host::Setup;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    return jaxcomm::host::Decode<Type>(&jaxcomm::host::Api::start, api, context, diagnostic);
  }
};

template <>
struct xla::ffi::CtxDecoding<jaxcomm::host::Call> {
  using Type = jaxcomm::host::Call;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_ExecutionContext* context,
                                    DiagnosticEngine& diagnostic) {
    return jaxcomm::host::Decode<Type>(&jaxcomm::host::Api::find, api, context, diagnostic);
  }
};
