#include "cuda/xla/call_site.h"

#include <string>

namespace jaxcomm {
namespace cuda {

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
  // GPUs of this process; none if the lowering did not know the processes.
  const int64_t num_local = CountLocal(spec.processes, settings.process);
  // The others may still wait for their earlier work.
  const Status met = first_run.Join(run, num_local, (kTimeoutsOfEarlierWork + 1) * settings.timeout_s);
  JAXCOMM_RETURN_IF_ERROR(earlier);
  JAXCOMM_RETURN_IF_ERROR(met);
  const StatusOr<Communicator*> found = GetCommunicator(collectives, Groups(), members, device);
  JAXCOMM_RETURN_IF_ERROR(found.status());
  Communicator* communicator = *found;
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

ffi::Error DecodeMembers(const CallSpec& spec, const ffi::Dictionary& attributes, std::vector<Member>* members) {
  // Process and number of every GPU of `groups`.
  if (const auto found = attributes.get<ffi::Span<const int32_t>>("members")) {
    if (found->size() != 2 * spec.groups.size()) {
      return Invalid(spec, "attribute members is not of two numbers for each device");
    }
    for (size_t i = 0; i < found->size(); i += 2) {
      members->push_back({static_cast<uint64_t>(found->begin()[i]), found->begin()[i + 1]});
    }
  }
  if (!spec.processes.empty() && spec.processes.size() != spec.groups.size()) {
    return Invalid(spec, "attribute processes has " + std::to_string(spec.processes.size()) + " devices, groups " +
                             std::to_string(spec.groups.size()));
  }
  const auto num_devices = static_cast<int64_t>(spec.groups.size());
  if (spec.group_size < 1 || num_devices % spec.group_size != 0) {
    return Invalid(spec, std::to_string(num_devices) + " devices cannot be split into groups of " +
                             std::to_string(spec.group_size));
  }
  return ffi::Error::Success();
}

}  // namespace cuda
}  // namespace jaxcomm
