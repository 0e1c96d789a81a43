// The stages Initialize and Execute of jaxcomm's own calls, and the bindings of all stages. `Kind` says what a call is:
//   State: a CallSite.  Call: what a device keeps of it.
//   Decode(state, args, rets): the operands, or an error that is the same on all devices.
//   Identity(state, operands): a hash that differs between calls of different lines, types or arguments, and between
//     equal starts of one line.
//   Make(state, communicator, operands): the call of a device. Collective.
//   Ready(state, collectives, operands, call, stream): before each run.
//   Launch(call, operands, stream).
#pragma once

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <utility>

#include "cuda/xla/call_site.h"

namespace jaxcomm::cuda {

// Makes the call on this device, in its first run. It is never replaced, because CUDA graphs keep its addresses, and
// needs no communicator of XLA from then on.
template <typename Kind, typename Operands>
Status MakeCall(typename Kind::State& state, const XlaCollectives& collectives, int32_t device,
                const Operands& operands, cudaStream_t stream, int64_t run) {
  if (state.Find(device) != nullptr) return OkStatus();
  JAXCOMM_ASSIGN_OR_RETURN(Communicator* const communicator,
                           state.BeginFirstRun(collectives, device, stream, run, Kind::Identity(state, operands)));
  // Without the lock: the other devices of the group must do the same at the same time.
  JAXCOMM_ASSIGN_OR_RETURN(auto made, Kind::Make(state, *communicator, operands));
  std::lock_guard<std::mutex> lock(state.mutex);
  state.calls[device] = std::move(made);
  return OkStatus();
}

// The local devices of a run meet after this stage. XLA would end the process if only some of them returned an error,
// so an error here must be the same on all of them. Errors of one device are deferred to Execute.
template <typename Kind>
ffi::Error InitializeCall(cudaStream_t stream, typename Kind::State* state, XlaCollectives collectives, ffi::RunId run,
                          int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const auto operands = Kind::Decode(*state, args, rets);
  if (!operands.ok()) return ToFfi(state->spec, operands.status());
  // Execute checks too, but XLA does not call it for the replay of a CUDA graph.
  if (ffi::Error failure = FailureOf(state->spec, state->FailureBefore(run.run_id)); !failure.success()) return failure;
  if (!state->ProblemOf(device).ok()) return ffi::Error::Success();
  Status problem = MakeCall<Kind>(*state, collectives, device, *operands, stream, run.run_id);
  if (problem.ok()) {
    problem = Kind::Ready(*state, collectives, *operands, *state->Find(device), stream);
    NoteIfUnavailable(state->spec, problem);
  }
  if (!problem.ok()) state->SetProblem(device, problem);
  return ffi::Error::Success();
}

template <typename Kind>
ffi::Error EnqueueCall(cudaStream_t stream, typename Kind::State& state, int32_t device, ffi::RemainingArgs args,
                       ffi::RemainingRets rets) {
  if (const Status problem = state.ProblemOf(device); !problem.ok()) return ToFfi(state.spec, problem);
  auto* const call = state.Find(device);
  if (call == nullptr) return Invalid(state.spec, "XLA has not initialized the call on GPU " + std::to_string(device));
  if (ffi::Error failure = FailureOf(state.spec, call->communicator().CheckUsable()); !failure.success())
    return failure;
  const auto operands = Kind::Decode(state, args, rets);
  if (!operands.ok()) return ToFfi(state.spec, operands.status());
  const Status launched = Kind::Launch(*call, *operands, stream);
  NoteIfUnavailable(state.spec, launched);
  return ToFfi(state.spec, launched);
}

// After an error, XLA does not enqueue `done` of transfers that have been started, and reuses their memory for later
// work of `stream`. That work waits for them.
template <typename Kind>
ffi::Error ExecuteCall(cudaStream_t stream, typename Kind::State* state, int32_t device, ffi::RemainingArgs args,
                       ffi::RemainingRets rets) {
  ffi::Error error = EnqueueCall<Kind>(stream, *state, device, args, rets);
  if (!error.success()) Communicator::WaitForStarted(device, stream);
  return error;
}

template <typename State>
auto BindPrepare() {
  return ffi::Ffi::BindPrepare()
      .Ctx<ffi::State<State>>()
      .template Ctx<XlaCollectives>()
      .RemainingArgs()
      .RemainingRets();
}

template <typename State>
auto BindInitialize() {
  return ffi::Ffi::BindInitialize()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Ctx<ffi::State<State>>()
      .template Ctx<XlaCollectives>()
      .template Ctx<ffi::RunId>()
      .template Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets();
}

template <typename State>
auto BindExecute() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .template Ctx<ffi::State<State>>()
      .template Ctx<ffi::DeviceOrdinal>()
      .RemainingArgs()
      .RemainingRets();
}

}  // namespace jaxcomm::cuda
