// State of a call site that the handlers of jaxcomm's own calls share, and the begin of its first run on a device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/attributes.h"
#include "common/status.h"
#include "cuda/runtime/communicator.h"
#include "cuda/xla/call_communicator.h"
#include "cuda/xla/local_rendezvous.h"
#include "cuda/xla/run_status.h"
#include "cuda/xla/xla_collectives.h"

namespace jaxcomm {
namespace cuda {

struct CallSiteBase {
  const DeviceGroups& Groups();
  Status ProblemOf(int32_t device);
  void SetProblem(int32_t device, const Status& problem);
  // The group's communicator, in the first run on a device. Collective. `identity`: equal on ranks that make the same
  // call.
  StatusOr<Communicator*> BeginFirstRun(const XlaCollectives& collectives, int32_t device, cudaStream_t stream,
                                        int64_t run, uint64_t identity);

  CallSpec spec;
  std::vector<Member> members;  // of the groups, if XLA provides no communicators
  std::mutex mutex;
  std::map<int32_t, Status> problems;  // by local device: why its call can't be made, ever
  RunStatus run_status;
  LocalRendezvous first_run;

  // The same in all runs.
  std::once_flag split_once;
  std::optional<DeviceGroups> split;
};

// Errors of handlers.
ffi::Error Invalid(const CallSpec& spec, const std::string& problem);
ffi::Error ToFfi(const CallSpec& spec, const Status& status);
ffi::Error FailureOf(const CallSpec& spec, const Status& failure);

// One per call site and executable, shared by the local devices. `Call` has the method communicator().
template <typename Call>
struct CallSite : CallSiteBase {
  // The call on this device; null before Initialize. It is never replaced.
  Call* Find(int32_t device) {
    std::lock_guard<std::mutex> lock(mutex);
    const auto found = calls.find(device);
    return found == calls.end() ? nullptr : found->second.get();
  }

  // An error if a run must not continue: a kernel of the process has aborted, or ranks did not meet.
  Status FailureBefore(int64_t run) {
    return run_status.Of(run, [&] {
      Status failure = Communicator::FirstFailure();
      std::lock_guard<std::mutex> lock(mutex);
      for (const auto& [device, call] : calls) {
        if (failure.ok()) failure = call->communicator().Failure();
      }
      return failure;
    });
  }

  // The stage Initialize: make(communicator) makes the call on this device in the first run, collectively. The local
  // devices of a run meet after this stage. XLA would end the process if only some of them returned an error, so an
  // error here must be the same on all of them. Errors of one device are deferred to Execute.
  template <typename Make>
  ffi::Error Initialize(const XlaCollectives& collectives, int32_t device, cudaStream_t stream, int64_t run,
                        uint64_t identity, const Make& make) {
    // Execute checks too, but XLA does not call it for the replay of a CUDA graph.
    if (ffi::Error failure = FailureOf(spec, FailureBefore(run)); !failure.success()) return failure;
    if (!ProblemOf(device).ok() || Find(device) != nullptr) return ffi::Error::Success();
    const auto make_call = [&]() -> Status {
      const StatusOr<Communicator*> communicator = BeginFirstRun(collectives, device, stream, run, identity);
      JAXCOMM_RETURN_IF_ERROR(communicator.status());
      // Without the lock: the other devices of the group must do the same at the same time.
      StatusOr<std::unique_ptr<Call>> made = make(**communicator);
      JAXCOMM_RETURN_IF_ERROR(made.status());
      std::lock_guard<std::mutex> lock(mutex);
      calls[device] = *std::move(made);
      return OkStatus();
    };
    if (const Status problem = make_call(); !problem.ok()) SetProblem(device, problem);
    return ffi::Error::Success();
  }

  // The begin of the stage Execute: an error if the call on this device can't run.
  ffi::Error CheckReady(int32_t device) {
    if (const Status problem = ProblemOf(device); !problem.ok()) return ToFfi(spec, problem);
    Call* const call = Find(device);
    if (call == nullptr) return Invalid(spec, "XLA has not initialized the call on GPU " + std::to_string(device));
    return FailureOf(spec, call->communicator().CheckUsable());
  }

  std::map<int32_t, std::unique_ptr<Call>> calls;  // by local device
};

// Reads the attribute `members`, if there is one, and checks the groups of `spec`.
ffi::Error DecodeMembers(const CallSpec& spec, const ffi::Dictionary& attributes, std::vector<Member>* members);

}  // namespace cuda
}  // namespace jaxcomm
