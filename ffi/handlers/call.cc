#include "handlers/call.h"

#include <optional>
#include <utility>

namespace jaxcomm {

ffi::TypeId CallState::id = {};
ffi::TypeInfo CallState::info = ffi::MakeTypeInfo<CallState>();

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

ffi::ErrorOr<std::unique_ptr<CallState>> MakeState(CallSpec spec) {
  StatusOr<std::shared_ptr<Meeting>> meeting = Meeting::Make(std::move(spec));
  if (!meeting.ok()) return ffi::Unexpected(ffi::Error::InvalidArgument("jaxcomm: " + meeting.status().message()));
  auto state = std::make_unique<CallState>();
  state->meeting = *std::move(meeting);
  return state;
}

ffi::Future Failed(const Status& error) {
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
    return Failed(InvalidArgumentError("jaxcomm: unsupported element type " +
                                       std::to_string(static_cast<int>(x.element_type()))));
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
