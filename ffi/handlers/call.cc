#include "handlers/call.h"

#include <optional>
#include <utility>

namespace jaxcomm {

ffi::TypeId CpuCallState::id = {};
ffi::TypeInfo CpuCallState::info = ffi::MakeTypeInfo<CpuCallState>();

namespace {

ffi::Error ToFfi(const Status& error) {
  return ffi::Error(error.code() == StatusCode::kDeadlineExceeded ? ffi::ErrorCode::kDeadlineExceeded
                                                                  : ffi::ErrorCode::kInvalidArgument,
                    error.message());
}

class PromiseCompletion : public Completion {
 public:
  explicit PromiseCompletion(ffi::Promise promise) : promise_(std::move(promise)) {}
  void Succeed() override { promise_.SetAvailable(); }
  void Fail(const Status& error) override { promise_.SetError(ToFfi(error)); }

 private:
  ffi::Promise promise_;
};

}  // namespace

ffi::ErrorOr<std::unique_ptr<CpuCallState>> MakeState(CallSpec spec) {
  const bool numbered = spec.numbered != 0;
  StatusOr<std::shared_ptr<Rendezvous>> rendezvous = Rendezvous::Make(std::move(spec));
  if (!rendezvous.ok())
    return ffi::Unexpected(ffi::Error::InvalidArgument("jaxcomm: " + rendezvous.status().message()));
  auto state = std::make_unique<CpuCallState>();
  state->rendezvous = *std::move(rendezvous);
  state->numbered = numbered;
  return state;
}

ffi::Future Failed(const Status& error) {
  ffi::Promise promise;
  ffi::Future future(promise);
  promise.SetError(ToFfi(error));
  return future;
}

ffi::Future Arrive(Rendezvous& rendezvous, const Participant& participant) {
  ffi::Promise promise;
  ffi::Future future(promise);
  rendezvous.Arrive(participant, std::make_unique<PromiseCompletion>(std::move(promise)));
  return future;
}

Participant ParticipantOf(ffi::RunId run, ffi::Buffer<ffi::S32> rank, DType dtype, ffi::AnyBuffer x,
                          ffi::Result<ffi::AnyBuffer> y) {
  Participant participant;
  participant.run_id = run.run_id;
  participant.rank = rank.typed_data()[0];
  participant.input = static_cast<const char*>(x.untyped_data());
  participant.output = static_cast<char*>(y->untyped_data());
  participant.dtype = dtype;
  participant.input_count = static_cast<int64_t>(x.element_count());
  participant.output_count = static_cast<int64_t>(y->element_count());
  return participant;
}

ffi::Future Execute(CpuCallState* state, ffi::RunId run, ffi::Buffer<ffi::S32> rank, ffi::AnyBuffer x,
                    ffi::RemainingArgs after, ffi::Result<ffi::AnyBuffer> y) {
  const std::optional<DType> dtype = FromFfi(x.element_type());
  if (!dtype) {
    return Failed(InvalidArgumentError("jaxcomm: unsupported element type " +
                                       std::to_string(static_cast<int>(x.element_type()))));
  }
  Participant participant = ParticipantOf(run, rank, *dtype, x, y);
  if (state->numbered) {
    const auto numbers = after.get<ffi::Buffer<ffi::U32>>(0);
    if (!numbers || numbers->element_count() != 2) return Failed(InvalidArgumentError("jaxcomm: a call has no number"));
    participant.run_id = state->rendezvous->RunOf(numbers->typed_data()[0]);
    participant.iteration = numbers->typed_data()[1];
  }
  return Arrive(*state->rendezvous, participant);
}

}  // namespace jaxcomm
