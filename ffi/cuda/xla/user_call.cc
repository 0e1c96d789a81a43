#include "cuda/xla/user_call.h"

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "common/hash.h"
#include "cuda/xla/call_stages.h"
#include "cuda/xla/user_arguments.h"
#include "cuda/xla/user_windows.h"

namespace jaxcomm {
namespace cuda {

ffi::TypeId UserCallState::id = {};
ffi::TypeInfo UserCallState::info = ffi::MakeTypeInfo<UserCallState>();

namespace {

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

void Fill(UserCall& call, host::CallData* data) {
  data->comm = call.comm;
  data->max_channels = call.max_channels;
  data->call = &call;
  data->gin = call.gin;
  data->nccl_comm = call.nccl_comm;
}

// Equal on all ranks that make the call. It leaves out max_sms, which has an error of its own.
uint64_t Identity(UserCallState& state, int32_t device) {
  std::lock_guard<std::mutex> lock(state.mutex);
  const uint64_t hash = Mix(Mix(state.arguments[device], state.spec.op), state.spec.site);
  return Mix(hash, static_cast<uint64_t>(state.spec.group_size));
}

// Makes the call on this device, in its first run.
Status Make(UserCallState& state, const XlaCollectives& collectives, int32_t device, cudaStream_t stream, int64_t run) {
  JAXCOMM_ASSIGN_OR_RETURN(Communicator* const found,
                           state.BeginFirstRun(collectives, device, stream, run, Identity(state, device)));
  Communicator& communicator = *found;
  const CallSpec& spec = state.spec;
  auto made = std::make_unique<UserCall>();
  made->state = &state;
  made->own_communicator = &communicator;
  made->comm = communicator.comm();
  made->name = std::make_shared<CallName>(spec.op + " at " + spec.site);
  made->comm.call_id = made->name->number();
  made->max_channels = communicator.max_channels();
  if (spec.max_sms > 0) {
    made->max_channels = static_cast<int32_t>(std::min<int64_t>(made->max_channels, spec.max_sms));
  }
  JAXCOMM_RETURN_IF_ERROR(communicator.CheckSameOnAllRanks("max_sms", static_cast<uint64_t>(made->max_channels)));
  std::lock_guard<std::mutex> lock(state.mutex);
  state.calls[device] = std::move(made);
  return OkStatus();
}

Status UsableError(const UserCall& call) {
  return WithPrefix(call.state->spec.Where() + " can't run, since a call before it failed: ",
                    call.communicator().CheckUsable());
}

Status TryStart(const Context& given, host::CallData* data) {
  JAXCOMM_ASSIGN_OR_RETURN(const auto state, given.Get<ffi::State<UserCallState>>());
  JAXCOMM_ASSIGN_OR_RETURN(const auto device, given.Get<ffi::DeviceOrdinal>());
  JAXCOMM_ASSIGN_OR_RETURN(const auto stream, given.Get<ffi::PlatformStream<cudaStream_t>>());
  const XlaCollectives collectives(given.api, given.context);
  const std::string prefix = state->spec.Where() + ": ";
  const bool first = state->Find(device) == nullptr;
  if (first) {
    JAXCOMM_ASSIGN_OR_RETURN(const auto run, given.Get<ffi::RunId>());
    JAXCOMM_RETURN_IF_ERROR(WithPrefix(prefix, Make(*state, collectives, device, stream, run.run_id)));
  }
  UserCall& call = *state->Find(device);
  JAXCOMM_RETURN_IF_ERROR(UsableError(call));
  const Status placed = PlaceWindows(*state, call, first, collectives, device, stream);
  NoteIfUnavailable(state->spec, placed);
  JAXCOMM_RETURN_IF_ERROR(WithPrefix(prefix, placed));
  Fill(call, data);
  return OkStatus();
}

Status CheckNodes(const UserCall& call) {
  if (call.HasOneNode() || call.nccl_comm != nullptr) return OkStatus();
  return InvalidArgumentError(call.state->spec.Where() +
                              ": the group's GPUs are of several nodes, and Initialize has not called "
                              "jaxcomm::host::Setup::UseGin: call the target over groups of " +
                              std::to_string(call.comm.local.size) + " ranks");
}

void FillGin(UserCall& call) {
  const Gin* const gin = call.nccl_comm != nullptr ? call.communicator().gin() : nullptr;
  if (gin != nullptr) call.gin = gin->Handle(call.comm, call.communicator().Registered(call.comm.arena));
}

Status TryUseGin(host::CallData* data, int32_t nccl_version) {
  auto& call = *static_cast<UserCall*>(data->call);
  if (call.nccl_comm == nullptr) {
    const std::string where = call.state->spec.Where() + ": ";
    const Status same = call.communicator().CheckSameOnAllRanks("the NCCL version of the kernel's headers",
                                                                static_cast<uint64_t>(nccl_version));
    JAXCOMM_RETURN_IF_ERROR(WithPrefix(where, same));
    const Gin* const gin = call.communicator().gin();
    const GinVersion* const version = Gin::Find(nccl_version);
    if (version == nullptr || (gin != nullptr && version != &gin->version())) {
      return InvalidArgumentError(where + "the kernel was compiled with the headers of NCCL " +
                                  NcclVersionText(nccl_version) + ", expected those of " +
                                  (gin != nullptr ? NcclVersionText(gin->version().nccl_version) : Gin::Versions()));
    }
    call.nccl_comm = gin != nullptr ? &gin->nccl_comm() : version->none;
    FillGin(call);
  }
  Fill(call, data);
  return OkStatus();
}

Status TryReserve(host::CallData* data, int64_t bytes) {
  auto& call = *static_cast<UserCall*>(data->call);
  // A window that is large enough stays, because the executable and its CUDA graphs keep its address.
  if (bytes > call.comm.arena_bytes) {
    const Status reserved = call.communicator().ReserveFor(call.state->spec.op, bytes, &call.comm);
    JAXCOMM_RETURN_IF_ERROR(WithPrefix(call.state->spec.Where() + ": ", reserved));
    FillGin(call);
  }
  Fill(call, data);
  return OkStatus();
}

Status TryFindCall(const Context& given, host::CallData* data, int32_t* on_device) {
  JAXCOMM_ASSIGN_OR_RETURN(const auto state, given.Get<ffi::State<UserCallState>>());
  JAXCOMM_ASSIGN_OR_RETURN(const auto device, given.Get<ffi::DeviceOrdinal>());
  *on_device = device;
  JAXCOMM_RETURN_IF_ERROR(state->ProblemOf(device));
  UserCall* const call = state->Find(device);
  if (call == nullptr) {
    return InvalidArgumentError(state->spec.Where() +
                                ": the stage Initialize has not asked for jaxcomm::host::Setup on GPU " +
                                std::to_string(device));
  }
  JAXCOMM_RETURN_IF_ERROR(CheckNodes(*call));
  Fill(*call, data);
  JAXCOMM_RETURN_IF_ERROR(UsableError(*call));
  if (call->places == nullptr) return OkStatus();
  JAXCOMM_ASSIGN_OR_RETURN(const auto stream, given.Get<ffi::PlatformStream<cudaStream_t>>());
  const Status exchanged = call->places->Exchange(stream);
  NoteIfUnavailable(state->spec, exchanged);
  return WithPrefix(state->spec.Where() + ": ", exchanged);
}

const UserCall& CallOf(const host::CallData& data) { return *static_cast<const UserCall*>(data.call); }

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
  CallSpec& spec = state->spec;
  spec.op = call->target;
  spec.site = call->site;
  spec.group_size = call->group_size;
  spec.max_sms = call->max_sms;
  spec.groups.assign(groups->begin(), groups->end());
  if (const auto processes = attributes.get<ffi::Span<const int32_t>>("jaxcomm_processes")) {
    spec.processes.assign(processes->begin(), processes->end());
  }
  if (ffi::Error error = CheckGroups(spec); !error.success()) return ffi::Unexpected(std::move(error));
  if (ffi::Error error = DecodeWindows(attributes, state.get()); !error.success()) {
    return ffi::Unexpected(std::move(error));
  }
  std::lock_guard<std::mutex> lock(GetInitializers().mutex);
  const auto found = GetInitializers().of_target.find(spec.op);
  if (found != GetInitializers().of_target.end()) state->initialize = found->second;
  return state;
}

ffi::Error Prepare(UserCallState* state, XlaCollectives collectives, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Status status = collectives.Request(state->Groups());
  if (status.ok()) status = RequestWindows(*state, collectives, args, rets);
  return ToFfi(state->spec, status);
}

// All local devices of a run get the same result (RunStatus).
ffi::Error Begin(UserCallState* state, ffi::RunId run, int32_t device, ffi::RemainingArgs args,
                 ffi::RemainingRets rets) {
  if (state->initialize == nullptr) {
    return Invalid(state->spec, "the target has not been registered by jaxcomm.register_ffi_target");
  }
  StatusOr<std::vector<XlaCollectives::Buffer>> buffers = BuffersOf(*state, args, rets);
  if (!buffers.ok()) return ToFfi(state->spec, buffers.status());
  const bool first = state->Find(device) == nullptr;
  {
    std::lock_guard<std::mutex> lock(state->mutex);
    if (first) state->arguments[device] = HashOf(args, rets);
    state->buffers[device] = *std::move(buffers);
  }
  return FailureOf(state->spec, state->FailureBefore(run.run_id));
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
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaUserPrepare, cuda::Prepare, cuda::BindPrepare<cuda::UserCallState>());
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
  if (device.ok() && !state.ProblemOf(*device).ok()) return nullptr;
  if (device.ok() && state.Find(*device) == nullptr) {
    std::lock_guard<std::mutex> lock(state.mutex);
    state.arguments[*device] = Mix(state.arguments[*device], cuda::HashOf(frame->attrs));
  }
  XLA_FFI_Error* const error = state.initialize(frame);
  if (error == nullptr || !device.ok()) return error;
  state.SetProblem(*device, UnavailableError(::xla::ffi::internal::GetErrorMessage(frame->api, error)));
  ::xla::ffi::internal::DestroyError(frame->api, error);
  return nullptr;
}

}  // namespace jaxcomm
