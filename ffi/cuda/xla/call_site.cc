#include "cuda/xla/call_site.h"

#include <string>

#include "cuda/nccl/device_memory.h"
#include "cuda/runtime/own_communicators.h"

namespace jaxcomm::cuda {

const DeviceGroups& CallSiteBase::Groups() {
  std::call_once(split_once, [this] { split.emplace(spec.groups, spec.group_size); });
  return *split;
}

Status CallSiteBase::ProblemOf(int32_t device) {
  std::lock_guard<std::mutex> lock(mutex);
  const auto found = problems.find(device);
  return found == problems.end() ? OkStatus() : found->second;
}

void CallSiteBase::SetProblem(int32_t device, const Status& problem) {
  std::lock_guard<std::mutex> lock(mutex);
  problems[device] = problem;
}

StatusOr<Communicator*> CallSiteBase::BeginFirstRun(const XlaCollectives& collectives, int32_t device,
                                                    cudaStream_t stream, int64_t run, uint64_t identity) {
  const Communicator::Settings settings = Communicator::Configured();
  const Status earlier = WaitForEarlier(stream, settings.timeout_s);
  // GPUs of this process. If the lowering did not know the processes, only a process that is alone knows its GPUs: all.
  const bool all = spec.processes.empty() && settings.num_processes == 1;
  const int64_t num_local =
      CountLocal(all ? std::vector<int32_t>(spec.groups.size(), settings.process) : spec.processes, settings.process);
  // The others may still wait for their earlier work.
  const Status met = first_run.Join(run, num_local, (kTimeoutsOfEarlierWork + 1) * settings.timeout_s);
  NoteIfUnavailable(spec, earlier);
  JAXCOMM_RETURN_IF_ERROR(earlier);
  JAXCOMM_RETURN_IF_ERROR(met);
  FreeRetired(device);
  JAXCOMM_ASSIGN_OR_RETURN(void* const of_xla, collectives.Get(Groups()));
  JAXCOMM_ASSIGN_OR_RETURN(Communicator* const communicator, OwnCommunicator(static_cast<ncclComm_t>(of_xla), device));
  if (communicator->size() != spec.group_size) {
    return InvalidArgumentError("the group's communicator has " + std::to_string(communicator->size()) +
                                " ranks, the group " + std::to_string(spec.group_size));
  }
  // XLA initializes calls in the order in which it runs them. Another order on another rank is an error here, of the
  // calls of both lanes. Kernels would wait for each other or take each other's data.
  const std::string number = spec.number > 0 ? " (call " + std::to_string(spec.number + 1) + " of this line)" : "";
  JAXCOMM_RETURN_IF_ERROR(communicator->CheckSameCall(spec.op + " at " + spec.site + number, identity));
  if (spec.asynchronous == 0) return communicator;
  return communicator->AsynchronousLane();
}

void NoteIfUnavailable(const CallSpec& spec, const Status& status) {
  if (status.code() == StatusCode::kUnavailable) Communicator::NoteOwnFailure(spec.Where() + ": " + status.message());
}

ffi::Error Invalid(const CallSpec& spec, const std::string& problem) {
  return ffi::Error::InvalidArgument(spec.Where() + ": " + problem);
}

ffi::Error ToFfi(const CallSpec& spec, const Status& status) {
  return status.ok() ? ffi::Error::Success() : Invalid(spec, status.message());
}

ffi::Error FailureOf(const CallSpec& spec, const Status& failure) {
  if (failure.ok()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kDeadlineExceeded,
                    spec.Where() + " can't run, since a call before it failed: " + failure.message());
}

ffi::Error CheckGroups(const CallSpec& spec) {
  if (!spec.processes.empty() && spec.processes.size() != spec.groups.size()) {
    return Invalid(spec, "the call has processes of " + std::to_string(spec.processes.size()) +
                             " devices, expected those of the " + std::to_string(spec.groups.size()) +
                             " devices of its groups");
  }
  const auto num_devices = static_cast<int64_t>(spec.groups.size());
  if (spec.group_size < 1 || num_devices % spec.group_size != 0) {
    return Invalid(spec, std::to_string(num_devices) + " devices cannot be split into groups of " +
                             std::to_string(spec.group_size));
  }
  return ffi::Error::Success();
}

}  // namespace jaxcomm::cuda
