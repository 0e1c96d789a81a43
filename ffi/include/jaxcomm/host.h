// Gives an XLA FFI handler of a user the handle that its kernel needs: .Ctx<jaxcomm::host::Setup>() in the stage
// Initialize, .Ctx<jaxcomm::host::Call>() in the stage Execute. The handlers belong to a target that is registered by
// jaxcomm.register_ffi_target and called by jaxcomm.ffi_call. These two provide the earlier stages and the ranks of the
// group.
//
// Requires XLA's headers, which are in jax.ffi.include_dir(). Does not require CUDA's headers.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "host_api.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {
namespace host {

// One pointer per shared library. Hidden visibility keeps it apart from those of other loaded libraries.
__attribute__((visibility("hidden"))) inline const Api* api_of_library = nullptr;

inline void KeepText(void* sink, const char* text) { *static_cast<std::string*>(sink) = text; }

inline ::xla::ffi::Error CheckWindows(const CallData& data) {
  std::string problem;
  if (api_of_library->check_windows(&data, &KeepText, &problem)) return ::xla::ffi::Error::Success();
  return ::xla::ffi::Error::InvalidArgument(problem);
}

// The communicator of this call's group, in the stage Initialize. Collective: all ranks must reach their calls in the
// same order, and the first run on a device waits for the other ranks. The stage ends with an error if there is no
// communicator, if the ranks differ, or if a rank does not arrive within JAXCOMM_TIMEOUT_S. It also ends with an error
// after a failure, as Call describes. If one of several devices reported an error in this stage alone, XLA would end
// the process. jaxcomm therefore reports errors of this stage in Call.
class Setup {
 public:
  explicit Setup(const CallData& data) : data_(data) {}

  // The handle. It includes the arena after a call of Reserve.
  const device::Comm& comm() const { return data_.comm; }
  // The maximum number of thread blocks that the call may launch: JAXCOMM_MAX_SMS, or less if the call requests less.
  // The same on all ranks.
  int32_t max_channels() const { return data_.max_channels; }

  // Allocates an arena: Call::comm().arena has at least `bytes` bytes on every rank. The arena belongs to the target:
  // only the kernels of its calls on this communicator use it. It starts as zeros, and each call finds the data that
  // the previous call left. A call that requests more than the current size gets a new arena. Calls that hold the old
  // arena keep it.
  //
  // Collective: all ranks must pass the same number, in the same order of calls. If a rank has too little memory, or if
  // the ranks request different sizes, all ranks get an error. If a rank does not arrive, the others get an error after
  // JAXCOMM_TIMEOUT_S. Only the first run takes time.
  ::xla::ffi::Error Reserve(int64_t bytes) {
    std::string problem;
    if (api_of_library->reserve(&data_, bytes, &KeepText, &problem)) return ::xla::ffi::Error::Success();
    return ::xla::ffi::Error::InvalidArgument(problem);
  }

  // Declares that the kernel uses GIN (gin.h) for ranks of other nodes. Without this call, Execute ends with an error
  // if the group has several nodes. `nccl_version`: NCCL_VERSION_CODE of the headers with which the kernel was
  // compiled.
  //
  // Collective, as Reserve. All ranks get an error if they pass different versions, if the version is not the one for
  // which jaxcomm was built, or if the group has several nodes and GIN is off.
  ::xla::ffi::Error UseGin(int32_t nccl_version) {
    std::string problem;
    if (api_of_library->use_gin(&data_, nccl_version, &KeepText, &problem)) return ::xla::ffi::Error::Success();
    return ::xla::ffi::Error::InvalidArgument(problem);
  }

  // Whether peers can address the operands and results that jaxcomm.ffi_call lists as windows: all of them, or none.
  // The same on all ranks, and in all runs of the call. The error has the reason.
  ::xla::ffi::Error CheckWindows() const { return host::CheckWindows(data_); }
  bool has_windows() const { return CheckWindows().success(); }

 private:
  CallData data_;
};

// The communicator of this call's group in the stage Execute, with the arena. If Initialize failed on this device, the
// stage ends with that error. After a kernel of this communicator has aborted, the stage ends with an error that names
// the call of that kernel, the rank, and the peer that did not signal.
//
// If the call has windows, this enqueues a kernel first, in which all ranks meet and exchange the places of their
// buffers.
class Call {
 public:
  explicit Call(const CallData& data) : data_(data) {}

  // Passed to the kernel by value. Valid until the process ends, so the launch may be part of a CUDA graph.
  const device::Comm& comm() const { return data_.comm; }
  int32_t max_channels() const { return data_.max_channels; }

  // Arguments of device::Gin, for kernels whose Initialize calls UseGin. Passed to the kernel by value, and valid as
  // comm(). In a group of one node, the kernel may receive them, but must not use them.
  const device::GinHandle& gin() const { return data_.gin; }
  const ncclDevComm& nccl_comm() const { return *data_.nccl_comm; }

  // As Setup::has_windows.
  bool has_windows() const { return CheckWindows(data_).success(); }
  // A buffer of this call at every rank of the node, where `buffer` is its untyped_data(). Passed to the kernel by
  // value. Valid as long as the executable exists, so the launch may be part of a CUDA graph. An error: the call has no
  // windows, or the buffer is none of those that jaxcomm.ffi_call lists.
  //
  // The ranks have met: from its begin on, the kernel may read operands of its peers and write to their results. It
  // must not end before its peers have done so with those of this rank.
  ::xla::ffi::ErrorOr<device::BufferWindow> Window(const void* buffer) const {
    std::string problem;
    device::BufferWindow window;
    if (api_of_library->find_window(&data_, buffer, &window, &KeepText, &problem)) return window;
    return ::xla::ffi::Unexpected(::xla::ffi::Error::InvalidArgument(problem));
  }

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

// Called by jaxcomm.register_ffi_target. Returns null, or the version of these headers if they do not match the table.
// Layouts stay the same within a minor version.
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
