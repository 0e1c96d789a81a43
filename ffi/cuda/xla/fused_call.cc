#include "cuda/xla/fused_call.h"

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "common/hash.h"
#include "cuda/xla/call_stages.h"

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
  if (shape.scatters && (num_weights != 1 || state.weights != 1 || x.rows % n != 0))
    return Unexpected("shape of a scatter");
  for (size_t i = 0; i < num_weights; ++i) {
    const Matrix &w = operands[i + 1], &y = results[i];
    const bool has_rows = static_cast<int64_t>(i) >= state.weights;
    const int64_t gathered = n * shape.rows, rows_of_y = has_rows ? x.columns : gathered;
    if (w.rows != (has_rows ? gathered : x.columns) || y.columns != w.columns || y.rows != rows_of_y) {
      return Unexpected("shape");
    }
    if (w.dtype != x.dtype || !CanMultiply(x.dtype, y.dtype)) {
      return InvalidArgumentError(std::string("cuBLASLt does not multiply ") + Name(x.dtype) + " and " + Name(w.dtype) +
                                  " with result " + Name(y.dtype));
    }
    shape.weights.push_back({w.columns, y.dtype, has_rows});
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

ffi::ErrorOr<std::unique_ptr<FusedCallState>> Instantiate(ffi::Dictionary attributes) {
  auto state = std::make_unique<FusedCallState>();
  // A permute, whose sources differ between its transfers. A barrier has no attributes of its own.
  ffi::ErrorOr<CallSpec> decoded = DecodeCall(Collective::kBarrier, attributes);
  if (!decoded) return ffi::Unexpected(decoded.error());
  CallSpec& spec = state->spec;
  spec = *std::move(decoded);
  for (const auto& [name, field] :
       {std::pair{"scatters", &state->scatters}, std::pair{"keeps", &state->keeps}, std::pair{"tf32", &state->tf32},
        std::pair{"chunks", &state->chunks}, std::pair{"weights", &state->weights}}) {
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

// See call_stages.h.
struct FusedCall {
  using State = FusedCallState;

  static StatusOr<Decoded> Decode(const State& state, ffi::RemainingArgs args, ffi::RemainingRets rets) {
    return cuda::Decode(state, args, rets);
  }
  static uint64_t Identity(const State& state, const Decoded& decoded) {
    const FusedShape& shape = decoded.shape;
    uint64_t hash = HashAttributes(state.spec);
    for (const int64_t value : {int64_t{shape.scatters}, int64_t{shape.keeps}, int64_t{shape.tf32}, shape.chunks,
                                shape.rows, shape.contracted, static_cast<int64_t>(shape.operands)}) {
      hash = Mix(hash, static_cast<uint64_t>(value));
    }
    for (const FusedShape::Weight& weight : shape.weights) {
      hash = Mix(Mix(hash, static_cast<uint64_t>(weight.columns)), static_cast<uint64_t>(weight.result));
      hash = Mix(hash, weight.has_rows ? 1 : 0);
    }
    return hash;
  }
  static StatusOr<std::unique_ptr<FusedMatmul>> Make(const State& state, Communicator& communicator,
                                                     const Decoded& decoded) {
    return FusedMatmul::Make(state.spec, communicator, decoded.shape);
  }
  static Status Ready(State&, const XlaCollectives&, const Decoded&, FusedMatmul&, cudaStream_t) { return OkStatus(); }
  static Status Launch(FusedMatmul& call, const Decoded& decoded, cudaStream_t stream) {
    return call.Launch(decoded.buffers, stream);
  }
};

}  // namespace
}  // namespace cuda

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaFusedInstantiate, cuda::Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaFusedPrepare, cuda::Prepare, cuda::BindPrepare<cuda::FusedCallState>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaFusedInitialize, cuda::InitializeCall<cuda::FusedCall>,
                              cuda::BindInitialize<cuda::FusedCallState>());
XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaFusedExecute, cuda::ExecuteCall<cuda::FusedCall>,
                              cuda::BindExecute<cuda::FusedCallState>());

}  // namespace jaxcomm
