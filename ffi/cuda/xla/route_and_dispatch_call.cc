#include "cuda/xla/route_and_dispatch_call.h"

#include <cuda_runtime_api.h>

#include <memory>
#include <string>
#include <utility>

#include "common/hash.h"
#include "cuda/xla/call_stages.h"

namespace jaxcomm {
namespace cuda {

ffi::TypeId RouteAndDispatchState::id = {};
ffi::TypeInfo RouteAndDispatchState::info = ffi::MakeTypeInfo<RouteAndDispatchState>();

namespace {

struct Decoded {
  RouteAndDispatchShape shape;
  RouteAndDispatchBuffers buffers;
};

StatusOr<Decoded> Decode(const RouteAndDispatchState& state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Decoded decoded;
  RouteAndDispatchShape& shape = decoded.shape;
  RouteAndDispatchBuffers& buffers = decoded.buffers;
  shape = state.shape;
  const int64_t n = state.spec.group_size, num_local = shape.num_experts / n;
  const std::pair<int32_t**, int64_t> fields[] = {{&buffers.slot, shape.tokens * shape.choices},
                                                  {&buffers.expert, shape.tokens * shape.choices},
                                                  {&buffers.group_sizes, num_local},
                                                  {&buffers.group_counts, num_local},
                                                  {&buffers.demand, 1},
                                                  {&buffers.dropped, 1},
                                                  {&buffers.table, n * shape.num_experts}};
  constexpr size_t kFields = std::size(fields);
  if (args.size() != 3 || rets.size() != kFields + 1) {
    return InvalidArgumentError("unexpected number of operands or results");
  }
  const auto ids = args.get<ffi::Buffer<ffi::S32>>(1);
  const auto x = args.get<ffi::AnyBuffer>(2);
  auto y = rets.get<ffi::AnyBuffer>(kFields);
  if (!ids || !x || !y) return InvalidArgumentError("operands and results must be arrays, ids of 32 bits");
  const auto x_bytes = static_cast<int64_t>(x->size_bytes()), y_bytes = static_cast<int64_t>((*y)->size_bytes());
  if (shape.tokens > 0) shape.row_bytes = x_bytes / shape.tokens;
  bool fits = static_cast<int64_t>(ids->element_count()) == shape.tokens * shape.choices &&
              x_bytes == shape.tokens * shape.row_bytes && y_bytes == shape.capacity * shape.row_bytes;
  for (size_t i = 0; i < kFields; ++i) {
    auto field = rets.get<ffi::Buffer<ffi::S32>>(i);
    if (!field) return InvalidArgumentError("the routing must have integers of 32 bits");
    *fields[i].first = (*field)->typed_data();
    fits = fits && static_cast<int64_t>((*field)->element_count()) == fields[i].second;
  }
  if (!fits) return InvalidArgumentError("the sizes of operands and results do not fit the attributes");
  buffers.ids = ids->typed_data();
  buffers.x = static_cast<const char*>(x->untyped_data());
  buffers.y = static_cast<char*>((*y)->untyped_data());
  return decoded;
}

ffi::ErrorOr<std::unique_ptr<RouteAndDispatchState>> Instantiate(ffi::Dictionary attributes) {
  auto state = std::make_unique<RouteAndDispatchState>();
  // A barrier has no attributes of its own.
  ffi::ErrorOr<CallSpec> decoded = DecodeCall(Collective::kBarrier, attributes);
  if (!decoded) return ffi::Unexpected(decoded.error());
  state->spec = *std::move(decoded);
  RouteAndDispatchShape& shape = state->shape;
  const std::pair<const char*, int64_t*> numbers[] = {{"num_experts", &shape.num_experts},
                                                      {"capacity", &shape.capacity},
                                                      {"align", &shape.align},
                                                      {"slots", &shape.slots},
                                                      {"tokens", &shape.tokens},
                                                      {"choices", &shape.choices}};
  for (const auto& [name, number] : numbers) {
    const auto found = attributes.get<int64_t>(name);
    if (!found) return ffi::Unexpected(Invalid(state->spec, std::string("attribute ") + name + " is missing"));
    *number = *found;
  }
  if (ffi::Error error = CheckGroups(state->spec); !error.success()) return ffi::Unexpected(std::move(error));
  return state;
}

ffi::Error Prepare(RouteAndDispatchState* state, XlaCollectives collectives, ffi::RemainingArgs, ffi::RemainingRets) {
  return ToFfi(state->spec, collectives.Request(state->Groups()));
}

// See call_stages.h.
struct RouteAndDispatchCall {
  using State = RouteAndDispatchState;

  static StatusOr<Decoded> Decode(const State& state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
    return cuda::Decode(state, args, rets);
  }
  // DeviceCall compares the shapes.
  static uint64_t Identity(const State& state, const Decoded&) { return HashAttributes(state.spec); }
  static StatusOr<std::unique_ptr<DeviceCall>> Make(const State& state, Communicator& communicator,
                                                    const Decoded& decoded) {
    return DeviceCall::Make(state.spec, communicator, decoded.shape);
  }
  static Status Ready(State&, const XlaCollectives&, const Decoded&, DeviceCall&, cudaStream_t) { return OkStatus(); }
  static Status Launch(const DeviceCall& call, const Decoded& decoded, cudaStream_t stream) {
    return call.Launch(decoded.buffers, stream);
  }
};

}  // namespace
}  // namespace cuda

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaRouteAndDispatchInstantiate, cuda::Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaRouteAndDispatchPrepare, cuda::Prepare,
                              cuda::BindPrepare<cuda::RouteAndDispatchState>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaRouteAndDispatchInitialize, cuda::InitializeCall<cuda::RouteAndDispatchCall>,
                              cuda::BindInitialize<cuda::RouteAndDispatchState>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaRouteAndDispatchExecute, cuda::ExecuteCall<cuda::RouteAndDispatchCall>,
                              cuda::BindExecute<cuda::RouteAndDispatchState>(),  // rank, ids, x -> routing, rows
                              {ffi::Traits::kCmdBufferCompatible});

}  // namespace jaxcomm
