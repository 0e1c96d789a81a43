#include "cuda/xla/call.h"

#include <cuda_runtime_api.h>

#include <optional>
#include <utility>

namespace jaxcomm {
namespace cuda {

ffi::TypeId GpuCallState::id = {};
ffi::TypeInfo GpuCallState::info = ffi::MakeTypeInfo<GpuCallState>();

namespace {

ffi::Error Invalid(const CallSpec& spec, const std::string& problem) {
  return ffi::Error::InvalidArgument(spec.Where() + ": " + problem);
}

// What all handlers' operands and results are: the rank, which the communicator knows better; x; y. Of the barrier, any
// number of arrays that are passed on.
struct Buffers {
  DType dtype = DType::kU8;
  const void* x = nullptr;
  void* y = nullptr;
  int64_t input_count = 0;
  int64_t output_count = 0;
};

std::string Decode(const CallSpec& spec, ffi::RemainingArgs args, ffi::RemainingRets rets, Buffers* buffers) {
  if (args.size() != rets.size() + 1) return "one result per operand expected";
  for (size_t i = 0; i < rets.size(); ++i) {
    const auto x = args.get<ffi::AnyBuffer>(i + 1);
    auto y = rets.get<ffi::AnyBuffer>(i);
    if (!x || !y) return "operands and results must be arrays";
    if (spec.collective == Collective::kBarrier) {
      if (x->untyped_data() != (*y)->untyped_data()) return "results must be aliased to operands";
      continue;
    }
    const std::optional<DType> dtype = FromFfi(x->element_type());
    if (!dtype) return "unsupported element type " + std::to_string(static_cast<int>(x->element_type()));
    buffers->dtype = *dtype;
    buffers->x = x->untyped_data();
    buffers->y = (*y)->untyped_data();
    buffers->input_count = static_cast<int64_t>(x->element_count());
    buffers->output_count = static_cast<int64_t>((*y)->element_count());
  }
  return "";
}

template <Collective collective>
ffi::ErrorOr<std::unique_ptr<GpuCallState>> Instantiate(ffi::Dictionary attributes) {
  ffi::ErrorOr<CallSpec> decoded = DecodeCall(collective, attributes);
  if (!decoded) return ffi::Unexpected(decoded.error());
  auto state = std::make_unique<GpuCallState>();
  CallSpec& spec = state->spec;
  spec = *std::move(decoded);
  state->windows = attributes.get<int64_t>("windows").has_value();
  // Process and number of every GPU of `groups`.
  if (const auto members = attributes.get<ffi::Span<const int32_t>>("members")) {
    if (members->size() != 2 * spec.groups.size()) {
      return ffi::Unexpected(Invalid(spec, "attribute members is not of two numbers for each device"));
    }
    for (size_t i = 0; i < members->size(); i += 2) {
      state->members.push_back({members->begin()[i], members->begin()[i + 1]});
    }
  }
  const auto num_devices = static_cast<int64_t>(spec.groups.size());
  if (spec.group_size < 1 || num_devices % spec.group_size != 0) {
    return ffi::Unexpected(
        Invalid(spec, std::to_string(num_devices) + " devices are no groups of " + std::to_string(spec.group_size)));
  }
  return state;
}

// What peers use of the operand and the result. All ranks must come to the same, so it does not ask where they are.
void FindShared(GpuCallState& state, const Buffers& buffers) {
  const CallSpec& spec = state.spec;
  CallProgram call;
  std::string error;
  // As if they were of one node: between nodes windows are of no use. What does not fit, Initialize says.
  const RankPlacement placement = {0, static_cast<int32_t>(spec.group_size)};
  if (!MakeCallProgram(spec, buffers.dtype, buffers.input_count, buffers.output_count, placement,
                       Communicator::Configured().max_channels, &call, &error) ||
      call.program.steps.empty()) {
    return;
  }
  if (call.program.shares_input) state.shared.input_bytes = call.input_bytes;
  if (call.program.shares_output) state.shared.output_bytes = call.output_bytes;
}

void RequestWindows(GpuCallState& state, const XlaCollectives& collectives, const Buffers& buffers) {
  std::call_once(state.shared_once, [&] { FindShared(state, buffers); });
  std::vector<XlaCollectives::Buffer> shared;
  if (state.shared.input_bytes > 0) shared.push_back({buffers.x, state.shared.input_bytes});
  if (state.shared.output_bytes > 0) shared.push_back({buffers.y, state.shared.output_bytes});
  if (shared.empty()) return;
  const std::string error = collectives.RequestWindows(state.Groups(), shared);
  if (!error.empty()) WarnOfCopies(state.spec.Where(), error);
}

ffi::Error Prepare(GpuCallState* state, XlaCollectives collectives, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  std::string problem = RequestCommunicator(collectives, state->Groups(), state->members);
  if (problem.empty() && state->windows) {
    Buffers buffers;
    problem = Decode(state->spec, args, rets, &buffers);
    if (problem.empty()) RequestWindows(*state, collectives, buffers);
  }
  return problem.empty() ? ffi::Error::Success() : Invalid(state->spec, problem);
}

// The call site on this device; null before Initialize.
DeviceCall* Find(GpuCallState& state, int32_t device) {
  std::lock_guard<std::mutex> lock(state.mutex);
  const auto found = state.calls.find(device);
  return found == state.calls.end() ? nullptr : found->second.get();
}

std::string ProblemOf(GpuCallState& state, int32_t device) {
  std::lock_guard<std::mutex> lock(state.mutex);
  const auto found = state.problems.find(device);
  return found == state.problems.end() ? "" : found->second;
}

DeviceCall::XlaWindow WindowOf(GpuCallState& state, const XlaCollectives& collectives, const void* buffer) {
  DeviceCall::XlaWindow found;
  void* window = nullptr;
  const std::string problem = collectives.GetWindow(state.Groups(), buffer, &window, &found.offset);
  if (!problem.empty()) WarnOfCopies(state.spec.Where(), problem);
  found.window = static_cast<ncclWindow_t>(window);
  return found;
}

std::string FindOffsets(GpuCallState& state, const XlaCollectives& collectives, const Buffers& buffers,
                        DeviceCall& call, cudaStream_t stream) {
  DeviceCall::XlaWindow input, output;
  if (call.shares_input()) input = WindowOf(state, collectives, buffers.x);
  if (call.shares_output()) output = WindowOf(state, collectives, buffers.y);
  return call.ExchangeOffsets(buffers.x, buffers.y, input, output, stream);
}

std::string Initialized(GpuCallState& state, const XlaCollectives& collectives, int32_t device, const Buffers& buffers,
                        cudaStream_t stream) {
  const CallSpec& spec = state.spec;
  ncclComm_t nccl_comm = nullptr;
  const DeviceCall* const existing = Find(state, device);
  std::string error;
  if (existing == nullptr && !WaitForEarlier(stream, &error)) return error;
  error = GetCommunicator(collectives, state.Groups(), state.members, device, &nccl_comm);
  if (!error.empty()) return error;
  Communicator* const communicator = Communicator::Get(nccl_comm, &error);
  if (communicator == nullptr) return error;
  if (existing == nullptr || &existing->communicator() != communicator) {
    if (communicator->size() != spec.group_size) {
      return "the group's communicator has " + std::to_string(communicator->size()) + " ranks, the group " +
             std::to_string(spec.group_size);
    }
    // Without the lock: the other devices of the group must do the same at the same time.
    auto made = DeviceCall::Make(spec, *communicator, buffers.dtype, buffers.input_count, buffers.output_count, &error,
                                 state.windows);
    if (!made) return error;
    std::lock_guard<std::mutex> lock(state.mutex);
    state.calls[device].swap(made);  // the old one ends without the lock: to free its memory waits for the GPU
  }
  return "";
}

ffi::Error FailureOf(const CallSpec& spec, const std::string& failure) {
  if (failure.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kDeadlineExceeded,
                    spec.Where() + " can't run, since a call before it failed: " + failure);
}

// Why an execution must not go on: a kernel of the process has aborted, or ranks have not met.
std::string FailureBefore(GpuCallState& state, int64_t run) {
  return state.run_status.Of(run, [&] {
    std::string failure = Communicator::FirstFailure();
    std::lock_guard<std::mutex> lock(state.mutex);
    for (const auto& [device, call] : state.calls) {
      if (failure.empty()) failure = call->communicator().Failure();
    }
    return failure;
  });
}

// After this stage, the local devices of a run meet. If only some of them came, because others have an error, XLA would
// end the process: so all must get the same. What one device alone has an error of, it says in Execute.
ffi::Error Initialize(cudaStream_t stream, GpuCallState* state, XlaCollectives collectives, ffi::RunId run,
                      int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Buffers buffers;
  std::string problem = Decode(state->spec, args, rets, &buffers);
  if (!problem.empty()) return Invalid(state->spec, problem);
  // Execute looks too, but is not called for runs of a CUDA graph.
  if (ffi::Error failure = FailureOf(state->spec, FailureBefore(*state, run.run_id)); !failure.success())
    return failure;
  if (!ProblemOf(*state, device).empty()) return ffi::Error::Success();
  problem = Initialized(*state, collectives, device, buffers, stream);
  if (!problem.empty()) {
    std::lock_guard<std::mutex> lock(state->mutex);
    state->problems[device] = problem;
    return ffi::Error::Success();
  }
  DeviceCall& call = *Find(*state, device);
  if (state->windows) problem = FindOffsets(*state, collectives, buffers, call, stream);
  return problem.empty() ? ffi::Error::Success() : Invalid(state->spec, problem);
}

ffi::Error Execute(cudaStream_t stream, GpuCallState* state, int32_t device, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  if (const std::string problem = ProblemOf(*state, device); !problem.empty()) return Invalid(state->spec, problem);
  const DeviceCall* const call = Find(*state, device);
  if (call == nullptr) return Invalid(state->spec, "XLA has not initialized the call on GPU " + std::to_string(device));
  if (ffi::Error failure = FailureOf(state->spec, call->communicator().WhyNot()); !failure.success()) return failure;
  Buffers buffers;
  std::string problem = Decode(state->spec, args, rets, &buffers);
  if (problem.empty()) problem = call->Launch(buffers.x, buffers.y, stream);
  return problem.empty() ? ffi::Error::Success() : Invalid(state->spec, problem);
}

}  // namespace

const DeviceGroups& GpuCallState::Groups() {
  std::call_once(split_once, [this] { split.emplace(spec.groups, spec.group_size); });
  return *split;
}

}  // namespace cuda
}  // namespace jaxcomm

namespace jaxcomm {

#define JAXCOMM_COLLECTIVE(enumerator, name, Handler)                                                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Cuda##Handler##Instantiate, cuda::Instantiate<Collective::enumerator>, \
                                ffi::Ffi::BindInstantiate().Attrs());
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaPrepare, cuda::Prepare,
                              ffi::Ffi::BindPrepare()
                                  .Ctx<ffi::State<cuda::GpuCallState>>()
                                  .Ctx<XlaCollectives>()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaInitialize, cuda::Initialize,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::State<cuda::GpuCallState>>()
                                  .Ctx<XlaCollectives>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaExecute, cuda::Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::State<cuda::GpuCallState>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()   // rank, x
                                  .RemainingRets(),  // y
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxcomm
