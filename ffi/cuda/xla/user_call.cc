#include "cuda/xla/user_call.h"

#include <algorithm>
#include <memory>
#include <optional>

namespace jaxcomm {
namespace cuda {

ffi::TypeId UserCallState::id = {};
ffi::TypeInfo UserCallState::info = ffi::MakeTypeInfo<UserCallState>();

namespace {

using OnDevice = UserCallState::OnDevice;

// What a handler of the user's was called with, as far as this needs it. Null, and `problem` filled in, if XLA does not
// say.
struct Context {
  const XLA_FFI_Api* api;
  XLA_FFI_ExecutionContext* context;

  template <typename T>
  auto Get(std::string* problem) const {
    ffi::DiagnosticEngine diagnostic;
    auto value = ffi::CtxDecoding<T>::Decode(api, context, diagnostic);
    if (!value) *problem = "jaxcomm: not a call of jaxcomm.ffi_call: " + diagnostic.Result();
    return value;
  }
};

bool Complain(host::OnError on_error, void* sink, const std::string& problem) {
  if (!problem.empty()) on_error(sink, problem.c_str());
  return problem.empty();
}

struct Initializers {
  std::mutex mutex;
  std::map<std::string, XLA_FFI_Handler*> of_target;
};

Initializers& GetInitializers() {
  static auto* initializers = new Initializers;
  return *initializers;
}

std::string ProblemOf(UserCallState& state, int32_t device) {
  std::lock_guard<std::mutex> lock(state.mutex);
  const auto found = state.problems.find(device);
  return found == state.problems.end() ? "" : found->second;
}

OnDevice* Find(UserCallState& state, int32_t device) {
  std::lock_guard<std::mutex> lock(state.mutex);
  const auto found = state.calls.find(device);
  return found == state.calls.end() ? nullptr : &found->second;
}

void Fill(OnDevice& call, host::CallData* data) {
  data->comm = call.comm;
  data->max_channels = call.max_channels;
  data->call = &call;
}

std::string FailureOf(const OnDevice& call) {
  const std::string failure = call.communicator->WhyNot();
  return failure.empty() ? "" : call.state->Where() + " can't run, since a call before it failed: " + failure;
}

std::string Started(UserCallState& state, const XlaCollectives& collectives, int32_t device, OnDevice** call) {
  void* from_xla = nullptr;
  std::string error = collectives.Get(*state.split, &from_xla);
  if (!error.empty()) return state.Where() + ": " + error;
  Communicator* const communicator = Communicator::Get(static_cast<ncclComm_t>(from_xla), &error);
  if (communicator == nullptr) return state.Where() + ": " + error;
  if (communicator->size() != state.group_size) {
    return state.Where() + ": XLA's communicator has " + std::to_string(communicator->size()) + " ranks, the group " +
           std::to_string(state.group_size);
  }
  if (communicator->comm().local.size != communicator->size()) {
    return state.Where() + ": the group's GPUs are of several nodes, and a kernel reaches those of its own only: " +
           "call it over groups of " + std::to_string(communicator->placement().ranks_per_node) + " ranks";
  }
  *call = Find(state, device);
  if (*call == nullptr || (*call)->communicator != communicator) {
    OnDevice made;
    made.state = &state;
    made.communicator = communicator;
    made.comm = communicator->comm();
    made.name = std::make_shared<CallName>(state.target + " at " + state.site);
    made.comm.call_id = made.name->number();
    made.max_channels = communicator->max_channels();
    if (state.max_sms > 0) {
      made.max_channels = static_cast<int32_t>(std::min<int64_t>(made.max_channels, state.max_sms));
    }
    if (!communicator->IsSameOnAllRanks("max_sms", static_cast<uint64_t>(made.max_channels), &error)) {
      return state.Where() + ": " + error;
    }
    std::lock_guard<std::mutex> lock(state.mutex);
    *call = &(state.calls[device] = made);
  }
  return FailureOf(**call);
}

bool Start(const void* api, void* context, host::CallData* data, host::OnError on_error, void* sink) {
  const Context given = {static_cast<const XLA_FFI_Api*>(api), static_cast<XLA_FFI_ExecutionContext*>(context)};
  std::string problem;
  const auto state = given.Get<ffi::State<UserCallState>>(&problem);
  const auto device = given.Get<ffi::DeviceOrdinal>(&problem);
  if (!problem.empty()) return Complain(on_error, sink, problem);
  if (Find(**state, *device) == nullptr) {
    const auto stream = given.Get<ffi::PlatformStream<cudaStream_t>>(&problem);
    if (!problem.empty()) return Complain(on_error, sink, problem);
    if (!WaitForEarlier(*stream, &problem)) return Complain(on_error, sink, (*state)->Where() + ": " + problem);
  }
  OnDevice* call = nullptr;
  problem = Started(**state, XlaCollectives(given.api, given.context), *device, &call);
  if (problem.empty()) Fill(*call, data);
  return Complain(on_error, sink, problem);
}

bool Reserve(host::CallData* data, int64_t bytes, host::OnError on_error, void* sink) {
  auto& call = *static_cast<OnDevice*>(data->call);
  std::string problem;
  // A window that is large enough stays: the executable and its CUDA graphs know its address.
  if (bytes > call.comm.arena_bytes) {
    if (!call.communicator->ReserveFor(call.state->target, bytes, &call.comm, &problem)) {
      return Complain(on_error, sink, call.state->Where() + ": " + problem);
    }
  }
  Fill(call, data);
  return true;
}

bool FindCall(const void* api, void* context, host::CallData* data, host::OnError on_error, void* sink) {
  const Context given = {static_cast<const XLA_FFI_Api*>(api), static_cast<XLA_FFI_ExecutionContext*>(context)};
  std::string problem;
  const auto state = given.Get<ffi::State<UserCallState>>(&problem);
  const auto device = given.Get<ffi::DeviceOrdinal>(&problem);
  if (!problem.empty()) return Complain(on_error, sink, problem);
  if (problem = ProblemOf(**state, *device); !problem.empty()) return Complain(on_error, sink, problem);
  OnDevice* const call = Find(**state, *device);
  if (call == nullptr) {
    return Complain(on_error, sink,
                    (*state)->Where() + ": the stage Initialize has not asked for jaxcomm::host::Setup on GPU " +
                        std::to_string(*device));
  }
  Fill(*call, data);
  return Complain(on_error, sink, FailureOf(*call));
}

ffi::ErrorOr<std::unique_ptr<UserCallState>> Instantiate(ffi::Dictionary attributes) {
  const auto call = attributes.get<UserCallAttributes>("jaxcomm");
  if (!call) return ffi::Unexpected(ffi::Error::InvalidArgument("jaxcomm: not a call of jaxcomm.ffi_call"));
  const auto groups = attributes.get<ffi::Span<const int64_t>>("jaxcomm_groups");
  if (!groups) return ffi::Unexpected(groups.error());
  auto state = std::make_unique<UserCallState>();
  state->target = call->target;
  state->site = call->site;
  state->group_size = call->group_size;
  state->max_sms = call->max_sms;
  state->groups.assign(groups->begin(), groups->end());
  const auto num_devices = static_cast<int64_t>(state->groups.size());
  if (state->group_size < 1 || num_devices % state->group_size != 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(state->Where() + ": " + std::to_string(num_devices) +
                                                       " devices are no groups of " +
                                                       std::to_string(state->group_size)));
  }
  state->split.emplace(state->groups, state->group_size);
  std::lock_guard<std::mutex> lock(GetInitializers().mutex);
  const auto found = GetInitializers().of_target.find(state->target);
  if (found != GetInitializers().of_target.end()) state->initialize = found->second;
  return state;
}

ffi::Error Prepare(UserCallState* state, XlaCollectives collectives, ffi::RemainingArgs, ffi::RemainingRets) {
  const std::string problem = collectives.Request(*state->split);
  return problem.empty() ? ffi::Error::Success() : ffi::Error::InvalidArgument(state->Where() + ": " + problem);
}

// All local devices get the same: see RunStatus.
ffi::Error Begin(UserCallState* state, ffi::RunId run, ffi::RemainingArgs, ffi::RemainingRets) {
  if (state->initialize == nullptr) {
    return ffi::Error::InvalidArgument(state->Where() +
                                       ": the target has not been registered by jaxcomm.register_ffi_target");
  }
  const std::string failure = state->run_status.Of(run.run_id, [&] {
    std::lock_guard<std::mutex> lock(state->mutex);
    std::string found;
    for (const auto& [device, call] : state->calls) {
      if (found.empty()) found = FailureOf(call);
    }
    return found;
  });
  return failure.empty() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failure);
}

bool AsksForMetadata(const XLA_FFI_CallFrame& frame) {
  return frame.extension_start != nullptr && frame.extension_start->type == XLA_FFI_Extension_Metadata;
}

}  // namespace

void SetUserInitialize(const std::string& target, XLA_FFI_Handler* initialize) {
  std::lock_guard<std::mutex> lock(GetInitializers().mutex);
  GetInitializers().of_target[target] = initialize;
}

const host::Api& HostApi() {
  static const host::Api api = {sizeof(host::Api), sizeof(host::CallData), JAXCOMM_VERSION, &Start, &Reserve,
                                &FindCall};
  return api;
}

}  // namespace cuda

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaUserInstantiate, cuda::Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaUserPrepare, cuda::Prepare,
                              ffi::Ffi::BindPrepare()
                                  .Ctx<ffi::State<cuda::UserCallState>>()
                                  .Ctx<XlaCollectives>()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaUserBegin, cuda::Begin,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::State<cuda::UserCallState>>()
                                  .Ctx<ffi::RunId>()
                                  .RemainingArgs()
                                  .RemainingRets());

// What one device alone can't do, and only its user knows, it says in Execute: jaxcomm::host::Call ends the stage.
extern "C" XLA_FFI_Error* CudaUserInitialize(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* const refused = CudaUserBegin(frame);
  if (refused != nullptr || cuda::AsksForMetadata(*frame)) return refused;
  const cuda::Context given = {frame->api, frame->ctx};
  std::string problem;
  cuda::UserCallState& state = **given.Get<ffi::State<cuda::UserCallState>>(&problem);  // CudaUserBegin has got it too
  const auto device = given.Get<ffi::DeviceOrdinal>(&problem);
  if (device && !cuda::ProblemOf(state, *device).empty()) return nullptr;
  XLA_FFI_Error* const error = state.initialize(frame);
  if (error == nullptr || !device) return error;
  problem = ::xla::ffi::internal::GetErrorMessage(frame->api, error);
  ::xla::ffi::internal::DestroyError(frame->api, error);
  std::lock_guard<std::mutex> lock(state.mutex);
  state.problems[*device] = problem;
  return nullptr;
}

}  // namespace jaxcomm
