#include "call.h"

#include <optional>
#include <utility>

namespace jaxcomm {

ffi::TypeId CallState::id = {};
ffi::TypeInfo CallState::info = ffi::MakeTypeInfo<CallState>();

namespace {

ffi::Error ToFfi(const Error& error) {
  return ffi::Error(
      error.kind == Error::Kind::kDeadline ? ffi::ErrorCode::kDeadlineExceeded : ffi::ErrorCode::kInvalidArgument,
      error.message);
}

class PromiseCompletion : public Completion {
 public:
  explicit PromiseCompletion(ffi::Promise promise) : promise_(std::move(promise)) {}
  void Succeed() override { promise_.SetAvailable(); }
  void Fail(const Error& error) override { promise_.SetError(ToFfi(error)); }

 private:
  ffi::Promise promise_;
};

// Types of less than a byte arrive converted (jaxcomm/_lowering.py).
std::optional<DType> FromFfi(ffi::DataType type) {
  switch (type) {
#define JAXCOMM_CASE(theirs, ours) \
  case ffi::DataType::theirs:      \
    return DType::ours;
    JAXCOMM_CASE(PRED, kBool)
    JAXCOMM_CASE(S8, kS8)
    JAXCOMM_CASE(S16, kS16)
    JAXCOMM_CASE(S32, kS32)
    JAXCOMM_CASE(S64, kS64)
    JAXCOMM_CASE(U8, kU8)
    JAXCOMM_CASE(U16, kU16)
    JAXCOMM_CASE(U32, kU32)
    JAXCOMM_CASE(U64, kU64)
    JAXCOMM_CASE(F16, kF16)
    JAXCOMM_CASE(BF16, kBF16)
    JAXCOMM_CASE(F32, kF32)
    JAXCOMM_CASE(F64, kF64)
    JAXCOMM_CASE(C64, kC64)
    JAXCOMM_CASE(C128, kC128)
    JAXCOMM_CASE(F8E5M2, kF8E5M2)
    JAXCOMM_CASE(F8E4M3FN, kF8E4M3FN)
    JAXCOMM_CASE(F8E4M3, kF8E4M3)
    JAXCOMM_CASE(F8E3M4, kF8E3M4)
    JAXCOMM_CASE(F8E4M3B11FNUZ, kF8E4M3B11FNUZ)
    JAXCOMM_CASE(F8E5M2FNUZ, kF8E5M2FNUZ)
    JAXCOMM_CASE(F8E4M3FNUZ, kF8E4M3FNUZ)
    JAXCOMM_CASE(F8E8M0FNU, kF8E8M0FNU)
#undef JAXCOMM_CASE
    default:
      return std::nullopt;
  }
}

}  // namespace

CallSpec MakeSpec(Collective collective, const CallAttributes& call, Groups groups, Processes processes) {
  CallSpec spec;
  spec.collective = collective;
  spec.op = call.op;
  spec.site = call.site;
  spec.algorithm = call.algorithm;
  spec.groups.assign(groups.begin(), groups.end());
  spec.processes.assign(processes.begin(), processes.end());
  spec.group_size = call.group_size;
  spec.ranks_per_node = call.ranks_per_node;
  return spec;
}

ffi::ErrorOr<std::unique_ptr<CallState>> MakeState(CallSpec spec) {
  std::string error;
  auto state = std::make_unique<CallState>();
  state->meeting = Meeting::Make(std::move(spec), &error);
  if (!state->meeting) return ffi::Unexpected(ffi::Error::InvalidArgument("jaxcomm: " + error));
  return state;
}

ffi::Future Failed(const Error& error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ToFfi(error));
  return future;
}

ffi::Future Arrive(Meeting& meeting, const Arrival& arrival) {
  ffi::Promise promise;
  ffi::Future future(promise);
  meeting.Arrive(arrival, std::make_unique<PromiseCompletion>(std::move(promise)));
  return future;
}

ffi::Future Execute(CallState* state, ffi::RunId run, ffi::Buffer<ffi::S32> rank, ffi::AnyBuffer x,
                    ffi::Result<ffi::AnyBuffer> y) {
  const std::optional<DType> dtype = FromFfi(x.element_type());
  if (!dtype) {
    return Failed({Error::Kind::kInvalid,
                   "jaxcomm: unsupported element type " + std::to_string(static_cast<int>(x.element_type()))});
  }
  Arrival arrival;
  arrival.run = run.run_id;
  arrival.rank = rank.typed_data()[0];
  arrival.input = static_cast<const char*>(x.untyped_data());
  arrival.output = static_cast<char*>(y->untyped_data());
  arrival.dtype = *dtype;
  arrival.input_count = static_cast<int64_t>(x.element_count());
  arrival.output_count = static_cast<int64_t>(y->element_count());
  return Arrive(*state->meeting, arrival);
}

}  // namespace jaxcomm
