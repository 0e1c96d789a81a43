#include "cuda/xla/call.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "common/hash.h"
#include "cuda/xla/call_stages.h"

namespace jaxcomm {
namespace cuda {

ffi::TypeId GpuCallState::id = {};
ffi::TypeInfo GpuCallState::info = ffi::MakeTypeInfo<GpuCallState>();

namespace {

// Operands and results of all handlers: the rank, which is ignored because the communicator has it; x; y. dispatch and
// combine and all_to_all_v have the operands of their CPU handlers (ffi/handlers). The barrier has any number of
// arrays, which it passes on. Further operands of asynchronous calls are not read.
struct Buffers {
  DType dtype = DType::kU8;
  const void* x = nullptr;
  void* y = nullptr;
  int64_t input_count = 0;
  int64_t output_count = 0;
  RowOperands rows;
};

Status DecodeRows(const CallSpec& spec, ffi::RemainingArgs args, const Buffers& buffers, RowOperands* rows) {
  const bool combines = TraitsOf(spec.collective).SumsTokens();
  const auto vector = [&](size_t i, const void** data) -> StatusOr<int64_t> {
    const auto operand = args.get<ffi::AnyBuffer>(i);
    if (!operand || operand->element_type() != ffi::DataType::S32) {
      return InvalidArgumentError("the routing must have integers of 32 bits");
    }
    *data = operand->untyped_data();
    return static_cast<int64_t>(operand->element_count());
  };
  const StatusOr<int64_t> index = vector(2, &rows->index), table = vector(combines ? 5 : 3, &rows->table);
  JAXCOMM_RETURN_IF_ERROR(index.status());
  JAXCOMM_RETURN_IF_ERROR(table.status());
  rows->index_count = *index;
  rows->table_count = *table;
  if (!combines) return OkStatus();
  JAXCOMM_ASSIGN_OR_RETURN(const int64_t expert, vector(3, &rows->expert));
  const auto weights = args.get<ffi::AnyBuffer>(4);
  const auto type = buffers.dtype == DType::kF64 ? ffi::DataType::F64 : ffi::DataType::F32;
  const int64_t num_weights = weights ? static_cast<int64_t>(weights->element_count()) : -1;
  if (expert != *index || (num_weights != 0 && (num_weights != *index || weights->element_type() != type))) {
    return InvalidArgumentError("the sizes or types of experts, weights and slots do not match");
  }
  if (num_weights > 0) rows->weights = weights->untyped_data();
  return OkStatus();
}

// Operands: operand, start value of the result, table.
Status DecodeSlices(ffi::RemainingArgs args, const Buffers& buffers, RowOperands* rows) {
  const auto start = args.get<ffi::AnyBuffer>(2), table = args.get<ffi::AnyBuffer>(3);
  const bool wide = table && table->element_type() == ffi::DataType::S64;
  if (!start || !table || (!wide && table->element_type() != ffi::DataType::S32) ||
      FromFfi(start->element_type()) != buffers.dtype ||
      static_cast<int64_t>(start->element_count()) != buffers.output_count) {
    return InvalidArgumentError("element types or sizes of the operands do not match");
  }
  if (buffers.output_count > 0 && start->untyped_data() != buffers.y) {
    return InvalidArgumentError("the result must be aliased to the output operand");
  }
  rows->table = table->untyped_data();
  rows->table_count = static_cast<int64_t>(table->element_count());
  rows->int64_table = wide;
  return OkStatus();
}

StatusOr<Buffers> Decode(const CallSpec& spec, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Buffers buffers;
  const CollectiveTraits& traits = TraitsOf(spec.collective);
  const bool combines = traits.SumsTokens();
  const bool of_slices = traits.elements == ElementKind::kSlices;
  const bool of_rows = traits.elements == ElementKind::kTokens;
  // The values that an asynchronous call waits for are operands too.
  const bool fits = of_rows || of_slices     ? args.size() == (combines ? 6 : 4) && rets.size() == 1
                    : spec.asynchronous != 0 ? args.size() > rets.size()
                                             : args.size() == rets.size() + 1;
  if (!fits) {
    return InvalidArgumentError("unexpected number of operands or results");
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    const auto x = args.get<ffi::AnyBuffer>(i + 1);
    auto y = rets.get<ffi::AnyBuffer>(i);
    if (!x || !y) return InvalidArgumentError("operands and results must be arrays");
    if (traits.input == BufferBlocks::kNone) {
      if (x->untyped_data() != (*y)->untyped_data()) return InvalidArgumentError("results must be aliased to operands");
      continue;
    }
    const std::optional<DType> dtype = FromFfi(x->element_type());
    if (!dtype) {
      return InvalidArgumentError("unsupported element type " + std::to_string(static_cast<int>(x->element_type())));
    }
    buffers.dtype = *dtype;
    buffers.x = x->untyped_data();
    buffers.y = (*y)->untyped_data();
    buffers.input_count = static_cast<int64_t>(x->element_count());
    buffers.output_count = static_cast<int64_t>((*y)->element_count());
  }
  if (of_slices) JAXCOMM_RETURN_IF_ERROR(DecodeSlices(args, buffers, &buffers.rows));
  if (of_rows) JAXCOMM_RETURN_IF_ERROR(DecodeRows(spec, args, buffers, &buffers.rows));
  return buffers;
}

template <Collective collective>
ffi::ErrorOr<std::unique_ptr<GpuCallState>> Instantiate(ffi::Dictionary attributes) {
  ffi::ErrorOr<CallSpec> decoded = DecodeCall(collective, attributes);
  if (!decoded) return ffi::Unexpected(decoded.error());
  auto state = std::make_unique<GpuCallState>();
  CallSpec& spec = state->spec;
  spec = *std::move(decoded);
  state->symmetric_buffers = attributes.get<int64_t>("symmetric_buffers").has_value();
  if (ffi::Error error = CheckGroups(spec); !error.success()) return ffi::Unexpected(std::move(error));
  return state;
}

// Finds which of operand and result peers may use. All ranks must find the same, so it does not depend on placement.
// The number of channels is not known yet: small GPUs have fewer than configured, and a call that needs no window with
// many channels (LL messages) may need one with few.
void FindShared(GpuCallState& state, const Buffers& buffers) {
  const CallSpec& spec = state.spec;
  // As if all ranks were on one node: windows have no use between nodes. Initialize reports errors.
  const RankPlacement placement = {0, static_cast<int32_t>(spec.group_size)};
  for (int32_t channels = Communicator::Configured().max_channels; channels > 0; channels /= 2) {
    const StatusOr<CallProgram> call =
        MakeCallProgram(spec, buffers.dtype, buffers.input_count, buffers.output_count, placement, channels, true);
    if (!call.ok() || call->program.steps.empty()) continue;
    if (call->program.shares_input) state.shared.input_bytes = call->input_bytes;
    if (call->program.shares_output) state.shared.output_bytes = call->output_bytes;
  }
}

void RequestWindows(GpuCallState& state, const XlaCollectives& collectives, const Buffers& buffers) {
  std::call_once(state.shared_once, [&] { FindShared(state, buffers); });
  const Status status = collectives.RequestWindows(
      state.Groups(), {{buffers.x, state.shared.input_bytes}, {buffers.y, state.shared.output_bytes}});
  if (!status.ok()) WarnOfCopies(state.spec.Where(), status.message());
}

ffi::Error Prepare(GpuCallState* state, XlaCollectives collectives, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Status status = collectives.Request(state->Groups());
  if (status.ok() && state->symmetric_buffers) {
    const StatusOr<Buffers> buffers = Decode(state->spec, args, rets);
    status = buffers.status();
    if (status.ok()) RequestWindows(*state, collectives, *buffers);
  }
  return ToFfi(state->spec, status);
}

DeviceCall::XlaWindow WindowOf(GpuCallState& state, const XlaCollectives& collectives, const void* buffer) {
  const StatusOr<XlaCollectives::Window> found = collectives.GetWindow(state.Groups(), buffer);
  if (found.ok()) return {static_cast<ncclWindow_t>(found->window), found->offset};
  WarnOfCopies(state.spec.Where(), found.status().message());
  return {};
}

// See call_stages.h.
struct CollectiveCall {
  using State = GpuCallState;

  static StatusOr<Buffers> Decode(const State& state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
    return cuda::Decode(state.spec, args, rets);
  }
  // Ranks may have different numbers of rows: DeviceCall compares what must be the same.
  static uint64_t Identity(const State& state, const Buffers& buffers) {
    uint64_t hash = HashAttributes(state.spec);
    if (TraitsOf(state.spec.collective).elements == ElementKind::kTokens) return hash;
    hash = Mix(hash, static_cast<uint64_t>(buffers.dtype));
    hash = Mix(hash, static_cast<uint64_t>(buffers.input_count));
    return Mix(hash, static_cast<uint64_t>(buffers.output_count));
  }
  static StatusOr<std::unique_ptr<DeviceCall>> Make(const State& state, Communicator& communicator,
                                                    const Buffers& buffers) {
    return DeviceCall::Make(state.spec, communicator, buffers.dtype, buffers.input_count, buffers.output_count,
                            state.symmetric_buffers);
  }
  static Status Ready(State& state, const XlaCollectives& collectives, const Buffers& buffers, DeviceCall& call,
                      cudaStream_t stream) {
    if (!state.symmetric_buffers) return OkStatus();
    DeviceCall::XlaWindow input, output;
    if (call.shares_input()) input = WindowOf(state, collectives, buffers.x);
    if (call.shares_output()) output = WindowOf(state, collectives, buffers.y);
    return call.ExchangeOffsets(buffers.x, buffers.y, input, output, stream);
  }
  static Status Launch(const DeviceCall& call, const Buffers& buffers, cudaStream_t stream) {
    return call.Launch(buffers.x, buffers.y, stream, buffers.rows);
  }
};

// Ends an asynchronous call. It does nothing, as on CPUs (handlers/done.cc). XLA waits for the asynchronous call right
// before the first user of its result. This call is a user that comes after the values in `after`. An optimization
// barrier would not be: XLA drops operands of a barrier whose results nobody uses.
ffi::Error Done(ffi::AnyBuffer result, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> y) {
  if (y->untyped_data() == result.untyped_data()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("jaxcomm: done: the result must be aliased to the first operand");
}

}  // namespace
}  // namespace cuda

#define JAXCOMM_COLLECTIVE(enumerator, name, Handler, ...)                                             \
  XLA_FFI_DEFINE_HANDLER_SYMBOL(Cuda##Handler##Instantiate, cuda::Instantiate<Collective::enumerator>, \
                                ffi::Ffi::BindInstantiate().Attrs());
#include "collectives.def"
#undef JAXCOMM_COLLECTIVE

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaPrepare, cuda::Prepare, cuda::BindPrepare<cuda::GpuCallState>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaInitialize, cuda::InitializeCall<cuda::CollectiveCall>,
                              cuda::BindInitialize<cuda::GpuCallState>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaExecute, cuda::ExecuteCall<cuda::CollectiveCall>,
                              cuda::BindExecute<cuda::GpuCallState>(), {ffi::Traits::kCmdBufferCompatible});
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaExecuteEagerly, cuda::ExecuteCall<cuda::CollectiveCall>,
                              cuda::BindExecute<cuda::GpuCallState>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDone, cuda::Done,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()    // result of the call
                                  .RemainingArgs()          // operand of the call, after
                                  .Ret<ffi::AnyBuffer>());  // y

}  // namespace jaxcomm
