#include "cuda/xla/fused_call.h"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "common/hash.h"

namespace jaxcomm {
namespace cuda {

ffi::TypeId FusedCallState::id = {};
ffi::TypeInfo FusedCallState::info = ffi::MakeTypeInfo<FusedCallState>();

namespace {

struct Decoded {
  FusedShape shape;
  FusedMatmul::Buffers buffers;
};

struct Matrix {
  DType dtype = DType::kF32;
  int64_t rows = 0, columns = 0;
  void* data = nullptr;
};

StatusOr<Matrix> MatrixOf(const ffi::AnyBuffer& buffer) {
  const auto dimensions = buffer.dimensions();
  const std::optional<DType> dtype = FromFfi(buffer.element_type());
  if (dimensions.size() != 2 || !dtype) return InvalidArgumentError("an operand or result is not a matrix");
  return Matrix{*dtype, dimensions[0], dimensions[1], buffer.untyped_data()};
}

Status Unexpected(const char* what) { return InvalidArgumentError(std::string("unexpected ") + what); }

StatusOr<Decoded> Decode(const FusedCallState& state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  if (args.size() < 3 || rets.size() != args.size()) return Unexpected("number of operands or results");
  const size_t num_weights = args.size() - 2;
  std::vector<Matrix> operands, results;  // x, weights; products, exchanged
  for (size_t i = 0; i <= num_weights; ++i) {
    const auto operand = args.get<ffi::AnyBuffer>(i + 1);
    auto result = rets.get<ffi::AnyBuffer>(i);
    if (!operand || !result) return InvalidArgumentError("operands and results must be arrays");
    const StatusOr<Matrix> given = MatrixOf(*operand), returned = MatrixOf(**result);
    JAXCOMM_RETURN_IF_ERROR(given.status());
    JAXCOMM_RETURN_IF_ERROR(returned.status());
    operands.push_back(*given);
    results.push_back(*returned);
  }
  auto workspace = rets.get<ffi::AnyBuffer>(num_weights + 1);
  if (!workspace) return InvalidArgumentError("operands and results must be arrays");

  Decoded decoded;
  FusedShape& shape = decoded.shape;
  const Matrix &x = operands[0], &exchanged = results[num_weights];
  const int64_t n = state.spec.group_size;
  shape.scatters = state.scatters != 0;
  shape.keeps = state.keeps != 0;
  shape.tf32 = state.tf32 != 0;
  shape.chunks = state.chunks;
  shape.rows = shape.scatters ? x.rows / n : x.rows;
  shape.contracted = x.columns;
  shape.operands = x.dtype;
  shape.workspace_bytes = static_cast<int64_t>((*workspace)->size_bytes());
  if (shape.chunks < 1 || shape.rows % shape.chunks != 0) return Unexpected("number of chunks");
  if (shape.scatters && (num_weights != 1 || x.rows % n != 0)) return Unexpected("shape of a scatter");
  for (size_t i = 0; i < num_weights; ++i) {
    const Matrix &w = operands[i + 1], &y = results[i];
    if (w.rows != x.columns || y.columns != w.columns || y.rows != n * shape.rows) return Unexpected("shape");
    if (w.dtype != x.dtype || !CanMultiply(x.dtype, y.dtype)) {
      return InvalidArgumentError(std::string("cuBLASLt does not multiply ") + Name(x.dtype) + " and " + Name(w.dtype) +
                                  " with result " + Name(y.dtype));
    }
    shape.weights.push_back({w.columns, y.dtype});
    decoded.buffers.weights.push_back(w.data);
    decoded.buffers.products.push_back(y.data);
  }
  const Matrix& moved = shape.scatters ? results[0] : x;
  if (exchanged.rows != n * shape.rows || exchanged.columns != moved.columns || exchanged.dtype != moved.dtype) {
    return Unexpected("shape");
  }
  decoded.buffers.x = x.data;
  decoded.buffers.exchanged = exchanged.data;
  decoded.buffers.workspace = (*workspace)->untyped_data();
  return decoded;
}

// See Identity of call.cc.
uint64_t Identity(const CallSpec& spec, const FusedShape& shape) {
  uint64_t hash = HashAttributes(spec);
  for (const int64_t value : {int64_t{shape.scatters}, int64_t{shape.keeps}, int64_t{shape.tf32}, shape.chunks,
                              shape.rows, shape.contracted, static_cast<int64_t>(shape.operands)}) {
    hash = Mix(hash, static_cast<uint64_t>(value));
  }
  for (const FusedShape::Weight& weight : shape.weights) {
    hash = Mix(Mix(hash, static_cast<uint64_t>(weight.columns)), static_cast<uint64_t>(weight.result));
  }
  return hash;
}

ffi::ErrorOr<std::unique_ptr<FusedCallState>> Instantiate(ffi::Dictionary attributes) {
  auto state = std::make_unique<FusedCallState>();
  // A permute, whose sources differ between its transfers. A barrier has no attributes of its own.
  ffi::ErrorOr<CallSpec> decoded = DecodeCall(Collective::kBarrier, attributes);
  if (!decoded) return ffi::Unexpected(decoded.error());
  CallSpec& spec = state->spec;
  spec = *std::move(decoded);
  for (const auto& [name, field] : {std::pair{"scatters", &state->scatters}, std::pair{"keeps", &state->keeps},
                                    std::pair{"tf32", &state->tf32}, std::pair{"chunks", &state->chunks}}) {
    const auto found = attributes.get<int64_t>(name);
    if (!found) return ffi::Unexpected(Invalid(spec, std::string("attribute ") + name + " is missing"));
    *field = *found;
  }
  if (ffi::Error error = DecodeMembers(spec, attributes, &state->members); !error.success()) {
    return ffi::Unexpected(std::move(error));
  }
  return state;
}

ffi::Error Prepare(FusedCallState* state, XlaCollectives collectives, ffi::RemainingArgs, ffi::RemainingRets) {
  return ToFfi(state->spec, RequestCommunicator(collectives, state->Groups(), state->members));
}

ffi::Error Initialize(cudaStream_t stream, FusedCallState* state, XlaCollectives collectives, ffi::RunId run,
                      int32_t device, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  const StatusOr<Decoded> decoded = Decode(*state, args, rets);
  if (!decoded.ok()) return ToFfi(state->spec, decoded.status());
  const FusedShape& shape = decoded->shape;
  return state->Initialize(
      collectives, device, stream, run.run_id, Identity(state->spec, shape),
      [&](Communicator& communicator) { return FusedMatmul::Make(state->spec, communicator, shape); });
}

ffi::Error Enqueue(cudaStream_t stream, FusedCallState* state, int32_t device, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  if (ffi::Error error = state->CheckReady(device); !error.success()) return error;
  const StatusOr<Decoded> decoded = Decode(*state, args, rets);
  if (!decoded.ok()) return ToFfi(state->spec, decoded.status());
  return ToFfi(state->spec, state->Find(device)->Launch(decoded->buffers, stream));
}

// After an error: see Execute of call.cc.
ffi::Error Execute(cudaStream_t stream, FusedCallState* state, int32_t device, ffi::RemainingArgs args,
                   ffi::RemainingRets rets) {
  ffi::Error error = Enqueue(stream, state, device, args, rets);
  if (!error.success()) Communicator::WaitForStarted(device, stream);
  return error;
}

}  // namespace
}  // namespace cuda

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaFusedInstantiate, cuda::Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaFusedPrepare, cuda::Prepare,
                              ffi::Ffi::BindPrepare()
                                  .Ctx<ffi::State<cuda::FusedCallState>>()
                                  .Ctx<XlaCollectives>()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaFusedInitialize, cuda::Initialize,
                              ffi::Ffi::BindInitialize()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::State<cuda::FusedCallState>>()
                                  .Ctx<XlaCollectives>()
                                  .Ctx<ffi::RunId>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()
                                  .RemainingRets());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaFusedExecute, cuda::Execute,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<ffi::State<cuda::FusedCallState>>()
                                  .Ctx<ffi::DeviceOrdinal>()
                                  .RemainingArgs()    // rank, x, weights
                                  .RemainingRets());  // products, exchanged, workspace

}  // namespace jaxcomm
