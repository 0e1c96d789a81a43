#include "cuda/xla/user_call.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/hash.h"
#include "cuda/xla/call_site.h"
#include "cuda/xla/user_arguments.h"
#include "cuda/xla/user_windows.h"

namespace jaxcomm {
namespace cuda {

ffi::TypeId UserCallState::id = {};
ffi::TypeInfo UserCallState::info = ffi::MakeTypeInfo<UserCallState>();

namespace {

using OnDevice = UserCallState::OnDevice;

// The arguments of a call of the user's handler that jaxcomm needs.
struct Context {
  const XLA_FFI_Api* api;
  XLA_FFI_ExecutionContext* context;

  template <typename T>
  StatusOr<typename ffi::CtxDecoding<T>::Type> Get() const {
    ffi::DiagnosticEngine diagnostic;
    auto value = ffi::CtxDecoding<T>::Decode(api, context, diagnostic);
    if (!value) return InvalidArgumentError("jaxcomm: not a call of jaxcomm.ffi_call: " + diagnostic.Result());
    return *std::move(value);
  }
};

// Passes an error to the user's library. Whether there was none.
bool Report(host::OnError on_error, void* sink, const Status& status) {
  if (!status.ok()) on_error(sink, status.message().c_str());
  return status.ok();
}

struct Initializers {
  std::mutex mutex;
  std::map<std::string, XLA_FFI_Handler*> of_target;
};

Initializers& GetInitializers() {
  static auto* initializers = new Initializers;
  return *initializers;
}

Status ProblemOf(UserCallState& state, int32_t device) {
  std::lock_guard<std::mutex> lock(state.mutex);
  const auto found = state.problems.find(device);
  return found == state.problems.end() ? OkStatus() : found->second;
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
  data->gin = call.gin;
  data->nccl_comm = call.nccl_comm;
}

// Equal on all ranks that make the call. It leaves out max_sms, which has an error of its own.
uint64_t Identity(UserCallState& state, int32_t device) {
  std::lock_guard<std::mutex> lock(state.mutex);
  const uint64_t hash = Mix(Mix(state.arguments[device], state.target), state.site);
  return Mix(hash, static_cast<uint64_t>(state.group_size));
}

Status FailureOf(const OnDevice& call) {
  return WithPrefix(call.state->Where() + " can't run, since a call before it failed: ",
                    call.communicator->CheckUsable());
}

// The call on this device, made in its first run. Errors are without the call's name.
StatusOr<OnDevice*> FindOrMake(UserCallState& state, const XlaCollectives& collectives, int32_t device) {
  if (OnDevice* const call = Find(state, device)) return call;
  const StatusOr<Communicator*> found = GetCommunicator(collectives, *state.split, device);
  JAXCOMM_RETURN_IF_ERROR(found.status());
  Communicator* const communicator = *found;
  // As the calls of jaxcomm's own (call.cc), with which it shares the communicator.
  JAXCOMM_RETURN_IF_ERROR(communicator->CheckSameCall(state.target + " at " + state.site, Identity(state, device)));
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
  JAXCOMM_RETURN_IF_ERROR(communicator->CheckSameOnAllRanks("max_sms", static_cast<uint64_t>(made.max_channels)));
  std::lock_guard<std::mutex> lock(state.mutex);
  return &(state.calls[device] = std::move(made));
}

// As the first run of a call of jaxcomm's own. Where the lowering did not know the processes, only a process that is
// alone is sure which GPUs are its own: all.
Status BeginFirstRun(UserCallState& state, cudaStream_t stream, int64_t run) {
  const Communicator::Settings settings = Communicator::Configured();
  const Status earlier = WaitForEarlier(stream, settings.timeout_s);
  const bool alone = settings.num_processes == 1;
  const int64_t num_local = CountLocal(
      alone ? std::vector<int32_t>(state.groups.size(), settings.process) : state.processes, settings.process);
  // The others may still wait for their earlier work.
  const Status met = state.first_run.Join(run, num_local, (kTimeoutsOfEarlierWork + 1) * settings.timeout_s);
  JAXCOMM_RETURN_IF_ERROR(earlier);
  return met;
}

Status TryStart(const Context& given, host::CallData* data) {
  const auto state = given.Get<ffi::State<UserCallState>>();
  JAXCOMM_RETURN_IF_ERROR(state.status());
  const auto device = given.Get<ffi::DeviceOrdinal>();
  JAXCOMM_RETURN_IF_ERROR(device.status());
  const auto stream = given.Get<ffi::PlatformStream<cudaStream_t>>();
  JAXCOMM_RETURN_IF_ERROR(stream.status());
  const std::string prefix = (*state)->Where() + ": ";
  const bool first = Find(**state, *device) == nullptr;
  if (first) {
    const auto run = given.Get<ffi::RunId>();
    JAXCOMM_RETURN_IF_ERROR(run.status());
    JAXCOMM_RETURN_IF_ERROR(WithPrefix(prefix, BeginFirstRun(**state, *stream, run->run_id)));
  }
  const XlaCollectives collectives(given.api, given.context);
  const StatusOr<OnDevice*> call = FindOrMake(**state, collectives, *device);
  JAXCOMM_RETURN_IF_ERROR(WithPrefix(prefix, call.status()));
  JAXCOMM_RETURN_IF_ERROR(FailureOf(**call));
  JAXCOMM_RETURN_IF_ERROR(WithPrefix(prefix, PlaceWindows(**state, **call, first, collectives, *device, *stream)));
  Fill(**call, data);
  return OkStatus();
}

Status CheckNodes(const OnDevice& call) {
  if (call.HasOneNode() || call.nccl_comm != nullptr) return OkStatus();
  return InvalidArgumentError(call.state->Where() +
                              ": the group's GPUs are of several nodes, and Initialize has not called "
                              "jaxcomm::host::Setup::UseGin: call the target over groups of " +
                              std::to_string(call.comm.local.size) + " ranks");
}

void FillGin(OnDevice& call) {
  const Gin* const gin = call.nccl_comm != nullptr ? call.communicator->gin() : nullptr;
  if (gin == nullptr) return;
  call.gin =
      gin->Handle(call.comm, call.comm.arena_bytes > 0 ? call.communicator->Registered(call.comm.arena) : nullptr);
}

Status TryUseGin(host::CallData* data, int32_t nccl_version) {
  auto& call = *static_cast<OnDevice*>(data->call);
  if (call.nccl_comm == nullptr) {
    const std::string where = call.state->Where() + ": ";
    const Status same = call.communicator->CheckSameOnAllRanks("the NCCL version of the kernel's headers",
                                                               static_cast<uint64_t>(nccl_version));
    JAXCOMM_RETURN_IF_ERROR(WithPrefix(where, same));
    if (nccl_version != NCCL_VERSION_CODE) {
      return InvalidArgumentError(
          where + "the kernel was compiled with the headers of NCCL " + NcclVersionText(nccl_version) +
          ", expected those for which jaxcomm was built: " + NcclVersionText(NCCL_VERSION_CODE));
    }
    const Gin* const gin = call.communicator->gin();
    call.nccl_comm = gin != nullptr ? &gin->nccl_comm() : &Gin::NoNcclComm();
    FillGin(call);
  }
  Fill(call, data);
  return OkStatus();
}

Status TryReserve(host::CallData* data, int64_t bytes) {
  auto& call = *static_cast<OnDevice*>(data->call);
  // A window that is large enough stays, because the executable and its CUDA graphs keep its address.
  if (bytes > call.comm.arena_bytes) {
    const Status reserved = call.communicator->ReserveFor(call.state->target, bytes, &call.comm);
    JAXCOMM_RETURN_IF_ERROR(WithPrefix(call.state->Where() + ": ", reserved));
    FillGin(call);
  }
  Fill(call, data);
  return OkStatus();
}

Status TryFindCall(const Context& given, host::CallData* data, int32_t* on_device) {
  const auto state = given.Get<ffi::State<UserCallState>>();
  JAXCOMM_RETURN_IF_ERROR(state.status());
  const auto device = given.Get<ffi::DeviceOrdinal>();
  JAXCOMM_RETURN_IF_ERROR(device.status());
  *on_device = *device;
  JAXCOMM_RETURN_IF_ERROR(ProblemOf(**state, *device));
  OnDevice* const call = Find(**state, *device);
  if (call == nullptr) {
    return InvalidArgumentError((*state)->Where() +
                                ": the stage Initialize has not asked for jaxcomm::host::Setup on GPU " +
                                std::to_string(*device));
  }
  JAXCOMM_RETURN_IF_ERROR(CheckNodes(*call));
  Fill(*call, data);
  JAXCOMM_RETURN_IF_ERROR(FailureOf(*call));
  if (call->places == nullptr) return OkStatus();
  const auto stream = given.Get<ffi::PlatformStream<cudaStream_t>>();
  JAXCOMM_RETURN_IF_ERROR(stream.status());
  return WithPrefix((*state)->Where() + ": ", call->places->Exchange(*stream));
}

const OnDevice& CallOf(const host::CallData& data) { return *static_cast<const OnDevice*>(data.call); }

// The functions of host::Api.

bool Start(const void* api, void* context, host::CallData* data, host::OnError on_error, void* sink) {
  const Context given = {static_cast<const XLA_FFI_Api*>(api), static_cast<XLA_FFI_ExecutionContext*>(context)};
  return Report(on_error, sink, TryStart(given, data));
}

bool Reserve(host::CallData* data, int64_t bytes, host::OnError on_error, void* sink) {
  return Report(on_error, sink, TryReserve(data, bytes));
}

bool UseGin(host::CallData* data, int32_t nccl_version, host::OnError on_error, void* sink) {
  return Report(on_error, sink, TryUseGin(data, nccl_version));
}

bool CheckWindows(const host::CallData* data, host::OnError on_error, void* sink) {
  return Report(on_error, sink, cuda::CheckWindows(CallOf(*data)));
}

bool FindWindow(const host::CallData* data, const void* buffer, device::BufferWindow* window, host::OnError on_error,
                void* sink) {
  return Report(on_error, sink, cuda::FindWindow(CallOf(*data), buffer, window));
}

bool FindCall(const void* api, void* context, host::CallData* data, host::OnError on_error, void* sink) {
  const Context given = {static_cast<const XLA_FFI_Api*>(api), static_cast<XLA_FFI_ExecutionContext*>(context)};
  int32_t device = -1;
  const Status status = TryFindCall(given, data, &device);
  if (!status.ok()) {
    // Transfers that have been started may still use memory that XLA reuses now: see call_stages.h.
    const auto stream = given.Get<ffi::PlatformStream<cudaStream_t>>();
    if (stream.ok()) Communicator::WaitForStarted(device, *stream);
  }
  return Report(on_error, sink, status);
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
  if (const auto processes = attributes.get<ffi::Span<const int32_t>>("jaxcomm_processes")) {
    state->processes.assign(processes->begin(), processes->end());
    if (state->processes.size() != state->groups.size()) {
      return ffi::Unexpected(ffi::Error::InvalidArgument(state->Where() + ": attribute jaxcomm_processes has " +
                                                         std::to_string(state->processes.size()) +
                                                         " devices, jaxcomm_groups " + std::to_string(num_devices)));
    }
  }
  if (state->group_size < 1 || num_devices % state->group_size != 0) {
    return ffi::Unexpected(ffi::Error::InvalidArgument(state->Where() + ": " + std::to_string(num_devices) +
                                                       " devices cannot be split into groups of " +
                                                       std::to_string(state->group_size)));
  }
  state->split.emplace(state->groups, state->group_size);
  if (ffi::Error error = DecodeWindows(attributes, state.get()); !error.success()) {
    return ffi::Unexpected(std::move(error));
  }
  std::lock_guard<std::mutex> lock(GetInitializers().mutex);
  const auto found = GetInitializers().of_target.find(state->target);
  if (found != GetInitializers().of_target.end()) state->initialize = found->second;
  return state;
}

ffi::Error Prepare(UserCallState* state, XlaCollectives collectives, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Status status = collectives.Request(*state->split);
  if (status.ok()) status = RequestWindows(*state, collectives, args, rets);
  return status.ok() ? ffi::Error::Success() : ffi::Error::InvalidArgument(state->Where() + ": " + status.message());
}

// All local devices of a run get the same result (RunStatus).
ffi::Error Begin(UserCallState* state, ffi::RunId run, int32_t device, ffi::RemainingArgs args,
                 ffi::RemainingRets rets) {
  if (state->initialize == nullptr) {
    return ffi::Error::InvalidArgument(state->Where() +
                                       ": the target has not been registered by jaxcomm.register_ffi_target");
  }
  StatusOr<std::vector<UserCallState::Buffer>> buffers = BuffersOf(*state, args, rets);
  if (!buffers.ok()) return ffi::Error::InvalidArgument(state->Where() + ": " + buffers.status().message());
  const bool first = Find(*state, device) == nullptr;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    if (first) state->arguments[device] = HashOf(args, rets);
    state->buffers[device] = *std::move(buffers);
  }
  const Status failure = state->run_status.Of(run.run_id, [&] {
    std::lock_guard<std::mutex> lock(state->mutex);
    Status found;
    for (const auto& [device, call] : state->calls) {
      if (found.ok()) found = FailureOf(call);
    }
    return found;
  });
  return failure.ok() ? ffi::Error::Success() : ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failure.message());
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
  static const host::Api api = {sizeof(host::Api), sizeof(host::CallData), JAXCOMM_VERSION, &Start, &Reserve, &FindCall,
                                &UseGin,           &CheckWindows,          &FindWindow};
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
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets());

// An error of the user's Initialize on one device is deferred to Execute, where jaxcomm::host::Call returns it.
extern "C" XLA_FFI_Error* CudaUserInitialize(XLA_FFI_CallFrame* frame) {
  XLA_FFI_Error* const refused = CudaUserBegin(frame);
  if (refused != nullptr || cuda::AsksForMetadata(*frame)) return refused;
  const cuda::Context given = {frame->api, frame->ctx};
  cuda::UserCallState& state = **given.Get<ffi::State<cuda::UserCallState>>();  // no error: CudaUserBegin has it too
  const auto device = given.Get<ffi::DeviceOrdinal>();
  if (device.ok() && !cuda::ProblemOf(state, *device).ok()) return nullptr;
  if (device.ok() && cuda::Find(state, *device) == nullptr) {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.arguments[*device] = Mix(state.arguments[*device], cuda::HashOf(frame->attrs));
  }
  XLA_FFI_Error* const error = state.initialize(frame);
  if (error == nullptr || !device.ok()) return error;
  Status problem = UnavailableError(::xla::ffi::internal::GetErrorMessage(frame->api, error));
  ::xla::ffi::internal::DestroyError(frame->api, error);
  std::lock_guard<std::mutex> lock(state.mutex);
  state.problems[*device] = std::move(problem);
  return nullptr;
}

}  // namespace jaxcomm
