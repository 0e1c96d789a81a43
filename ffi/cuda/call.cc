#include "call.h"

#include <cuda_runtime_api.h>

#include <optional>
#include <type_traits>
#include <utility>

#include "keep_device.h"
#include "launch.h"
#include "xla_collectives.h"

namespace jaxcomm {
namespace cuda {

ffi::TypeId CallState::id = {};
ffi::TypeInfo CallState::info = ffi::MakeTypeInfo<CallState>();

namespace {

std::string Where(const CallSpec& spec) { return "jaxcomm: " + spec.op + " at " + spec.site; }

ffi::Error Invalid(const CallSpec& spec, const std::string& problem) {
  return ffi::Error::InvalidArgument(Where(spec) + ": " + problem);
}

std::string Problem(const char* name, cudaError_t status) {
  if (status == cudaSuccess) return "";
  cudaGetLastError();  // or the next call of somebody else would report it
  return std::string(name) + ": " + cudaGetErrorString(status);
}

// Attributes of one op or another, as ffi/handlers/<op>.cc binds them on the CPU.
ffi::Error ReadOwnAttributes(const ffi::Dictionary& attributes, CallSpec* spec) {
  ffi::Error error;
  const auto take = [&](const char* name, auto* value) {
    const auto found = attributes.get<int64_t>(name);
    if (!found) error = ffi::Error::InvalidArgument(Where(*spec) + ": attribute " + name + " is missing or no int64");
    if (found) *value = static_cast<std::remove_reference_t<decltype(*value)>>(*found);
  };
  switch (spec->collective) {
    case Collective::kAllToAll:
      take("input_run", &spec->input_run);
      take("output_run", &spec->output_run);
      break;
    case Collective::kAllGather:
      take("output_run", &spec->output_run);
      break;
    case Collective::kReduceScatter:
      take("input_run", &spec->input_run);
      take("reduce_op", &spec->reduce_op);
      break;
    case Collective::kAllReduce:
      take("reduce_op", &spec->reduce_op);
      break;
    case Collective::kBroadcast:
      take("root", &spec->root);
      break;
    case Collective::kPermute: {
      const auto found = attributes.get<ffi::Span<const int64_t>>("source_of");
      if (!found) return ffi::Error::InvalidArgument(Where(*spec) + ": attribute source_of is missing or no array");
      spec->source_of.assign(found->begin(), found->end());
      break;
    }
    case Collective::kBarrier:
      break;
  }
  return error;
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
ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(ffi::Dictionary attributes) {
  const auto call = attributes.get<CallAttributes>("call");
  if (!call) return ffi::Unexpected(call.error());
  const auto groups = attributes.get<Groups>("groups");
  if (!groups) return ffi::Unexpected(groups.error());
  auto state = std::make_unique<CallState>();
  CallSpec& spec = state->spec;
  spec = MakeSpec(collective, *call, *groups, Processes());
  if (ffi::Error error = ReadOwnAttributes(attributes, &spec); !error.success()) return ffi::Unexpected(error);
  const auto num_devices = static_cast<int64_t>(spec.groups.size());
  if (spec.group_size < 1 || num_devices % spec.group_size != 0) {
    return ffi::Unexpected(
        Invalid(spec, std::to_string(num_devices) + " devices are no groups of " + std::to_string(spec.group_size)));
  }
  return state;
}

ffi::Error Prepare(CallState* state, XlaCollectives collectives, ffi::RemainingArgs, ffi::RemainingRets) {
  const std::string problem = collectives.Request(state->spec.groups, state->spec.group_size);
  return problem.empty() ? ffi::Error::Success() : Invalid(state->spec, problem);
}

// The call site on this device; null before Initialize.
DeviceCall* Find(CallState& state, int32_t device) {
  std::lock_guard<std::mutex> lock(state.mutex);
  const auto found = state.calls.find(device);
  return found == state.calls.end() ? nullptr : found->second.get();
}

std::string Initialized(CallState& state, const XlaCollectives& collectives, int32_t device, const Buffers& buffers) {
  const CallSpec& spec = state.spec;
  void* lent = nullptr;
  std::string error = collectives.Get(spec.groups, spec.group_size, &lent);
  if (!error.empty()) return error;
  Communicator* const communicator = Communicator::Get(static_cast<ncclComm_t>(lent), &error);
  if (communicator == nullptr) return error;
  const DeviceCall* const existing = Find(state, device);
  if (existing == nullptr || &existing->communicator() != communicator) {
    if (communicator->size() != spec.group_size) {
      return "XLA's communicator has " + std::to_string(communicator->size()) + " ranks, the group " +
             std::to_string(spec.group_size);
    }
    // Without the lock: the other devices of the group must do the same at the same time.
    auto made = DeviceCall::Make(spec, *communicator, buffers.dtype, buffers.input_count, buffers.output_count, &error);
    if (!made) return error;
    std::lock_guard<std::mutex> lock(state.mutex);
    state.calls[device] = std::move(made);
  }
  return "";
}

ffi::Error FailureOf(const CallSpec& spec, Communicator& communicator) {
  const std::string failure = communicator.Failure();
  if (failure.empty()) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kDeadlineExceeded,
                    Where(spec) + " can't run, since a call before it failed: " + failure);
}

ffi::Error Initialize(CallState* state, XlaCollectives collectives, int32_t device, ffi::RemainingArgs args,
                      ffi::RemainingRets rets) {
  Buffers buffers;
  std::string problem = Decode(state->spec, args, rets, &buffers);
  if (problem.empty()) problem = Initialized(*state, collectives, device, buffers);
  if (!problem.empty()) return Invalid(state->spec, problem);
  // Of an earlier run. Execute looks too, but is not called for runs of a CUDA graph.
  return FailureOf(state->spec, Find(*state, device)->communicator());
}

ffi::Error Execute(cudaStream_t stream, CallState* state, int32_t device, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  const DeviceCall* const call = Find(*state, device);
  if (call == nullptr) return Invalid(state->spec, "XLA has not initialized the call on GPU " + std::to_string(device));
  if (ffi::Error failure = FailureOf(state->spec, call->communicator()); !failure.success()) return failure;
  Buffers buffers;
  std::string problem = Decode(state->spec, args, rets, &buffers);
  if (problem.empty()) problem = call->Launch(buffers.x, buffers.y, stream);
  return problem.empty() ? ffi::Error::Success() : Invalid(state->spec, problem);
}

}  // namespace

std::unique_ptr<DeviceCall> DeviceCall::Make(const CallSpec& spec, Communicator& communicator, DType dtype,
                                             int64_t input_count, int64_t output_count, std::string* error) {
  std::unique_ptr<DeviceCall> made(new DeviceCall(communicator));
  if (!MakeCallProgram(spec, dtype, input_count, output_count, communicator.rank(), communicator.max_channels(),
                       &made->call_, error)) {
    return nullptr;
  }
  // Thread block c of a rank waits for thread block c of its peers.
  const auto num_channels = static_cast<uint64_t>(made->call_.num_channels());
  if (!communicator.IsSameOnAllRanks("the number of thread blocks (max_sms)", num_channels, error)) return nullptr;
  made->args_.comm = communicator.comm();
  device::Comm& comm = made->args_.comm;
  if (made->call_.arena.bytes > 0 &&
      !communicator.Reserve(made->call_.arena.bytes, &comm.arena, &comm.arena_bytes, error)) {
    return nullptr;
  }
  comm.program = Communicator::AddCall(spec.op + " at " + spec.site);
  if (made->call_.flagged) {
    made->call_.flagged->comm = comm;
    return made;
  }
  if (!made->Upload(error)) return nullptr;
  return made;
}

bool DeviceCall::Upload(std::string* error) {
  KeepDevice keep;
  const ProgramImage image(call_.program);
  *error = Problem("cudaSetDevice", cudaSetDevice(communicator_.device()));
  if (!error->empty()) return false;
  *error = Problem("cudaMalloc", cudaMalloc(&image_, image.bytes.size()));
  if (!error->empty()) return false;
  // Not the legacy default stream, which might wait for a kernel that waits for a peer.
  *error = Problem("cudaMemcpyAsync", cudaMemcpyAsync(image_, image.bytes.data(), image.bytes.size(),
                                                      cudaMemcpyHostToDevice, cudaStreamPerThread));
  if (!error->empty()) return false;
  *error = Problem("cudaStreamSynchronize", cudaStreamSynchronize(cudaStreamPerThread));
  if (!error->empty()) return false;
  args_ = MakeArgs(call_, args_.comm, image_, image);
  return true;
}

DeviceCall::~DeviceCall() {
  if (image_ == nullptr) return;
  KeepDevice keep;
  cudaSetDevice(communicator_.device());
  cudaFree(image_);
  cudaGetLastError();  // the process may be at its end, and the driver gone
}

std::string DeviceCall::CheckAlignment(const void* x, const void* y) const {
  for (const auto& [name, address] : {std::pair{"operand", x}, std::pair{"result", y}}) {
    if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(call_.item_bytes) == 0) continue;
    return std::string("the ") + name + " is not aligned to its elements of " + std::to_string(call_.item_bytes) +
           " bytes";
  }
  return "";
}

std::string DeviceCall::Launch(const void* x, void* y, cudaStream_t stream) const {
  std::string problem = CheckAlignment(x, y);
  if (!problem.empty() || call_.empty()) return problem;
  KeepDevice keep;
  problem = Problem("cudaSetDevice", cudaSetDevice(communicator_.device()));
  if (call_.flagged && problem.empty()) {
    return Problem("kernel", cuda::Launch(WithBuffers(*call_.flagged, x, y), stream));
  }
  const int32_t rank = communicator_.rank();
  const auto copy = [&](void* to, const void* from, int64_t bytes) {
    if (!problem.empty() || bytes == 0) return;
    problem = Problem("cudaMemcpyAsync",
                      cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice, stream));
  };
  if (call_.program.shares_input) copy(args_.input.At(rank), x, call_.input_bytes);
  if (problem.empty()) {
    problem = Problem("kernel", cuda::Launch(WithBuffers(call_, args_, x, y), call_.num_channels(), stream));
  }
  if (call_.program.shares_output) copy(y, args_.output.At(rank), call_.output_bytes);
  return problem;
}

}  // namespace cuda
}  // namespace jaxcomm

namespace jaxcomm {

#define JAXCOMM_COLLECTIVE(enumerator, name, Handler)                                                  \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Cuda##Handler##Instantiate, cuda::Instantiate<Collective::enumerator>, \
                                ffi::Ffi::BindInstantiate().Attrs());
#include "../collectives.def"
#undef JAXCOMM_COLLECTIVE

XLA_FFI_DEFINE_HANDLER_SYMBOL(
    CudaPrepare, cuda::Prepare,
    ffi::Ffi::BindPrepare().Ctx<ffi::State<cuda::CallState>>().Ctx<XlaCollectives>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaInitialize, cuda::Initialize,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::State<cuda::CallState>>()
                                  .Ctx<XlaCollectives>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaExecute, cuda::Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::State<cuda::CallState>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()   // rank, x
                                  .RemainingRets(),  // y
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxcomm
