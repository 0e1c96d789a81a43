// State of a call site that the handlers of jaxcomm's own calls share, and the begin of its first run on a device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/attributes.h"
#include "cuda/program/assign_or_return.h"
#include "cuda/runtime/communicator.h"
#include "cuda/xla/local_rendezvous.h"
#include "cuda/xla/xla_collectives.h"

namespace jaxcomm::cuda {

struct CallSiteBase {
  const DeviceGroups& Groups();
  Status ProblemOf(int32_t device);
  void SetProblem(int32_t device, const Status& problem);
  // The group's communicator, to which XLA's communicator of this run leads: in the first run on a device only. A later
  // run may have another communicator of XLA, but the call keeps its own. Prepare requests XLA's in every run: XLA
  // locks it for the run, and so orders the calls of all collectives on all ranks. Collective. `identity`: equal on
  // ranks that make the same call.
  StatusOr<Communicator*> BeginFirstRun(const XlaCollectives& collectives, int32_t device, cudaStream_t stream,
                                        int64_t run, uint64_t identity);

  CallSpec spec;
  std::mutex mutex;
  std::map<int32_t, Status> problems;  // by local device: why its call can't be made, ever
  RunStatus run_status;
  LocalRendezvous first_run;

  // The same in all runs.
  std::once_flag split_once;
  std::optional<DeviceGroups> split;
};

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

  std::map<int32_t, std::unique_ptr<Call>> calls;  // by local device
};

// Called with the outcome of what a rank does by itself: it waits for earlier work, gets ready for a run, launches.
// Peers wait for the kernel of a rank that can't, so an error of CUDA or XLA ends their waits. All ranks have the
// errors of arguments.
void NoteIfUnavailable(const CallSpec& spec, const Status& status);

// Errors of handlers.
ffi::Error Invalid(const CallSpec& spec, const std::string& problem);
ffi::Error ToFfi(const CallSpec& spec, const Status& status);
ffi::Error FailureOf(const CallSpec& spec, const Status& failure);
// An error if the devices of `spec` can't form its groups.
ffi::Error CheckGroups(const CallSpec& spec);

}  // namespace jaxcomm::cuda
