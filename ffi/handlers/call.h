// What all collectives' XLA handlers share: from FFI buffers and attributes to a Meeting, and from there to a future.
#pragma once

#include <memory>
#include <utility>

#include "../common/status.h"
#include "common/attributes.h"
#include "cpu/meeting.h"

namespace jaxcomm {

// One per call site and executable, shared by the local devices. XLA makes it from the attributes, before the first
// run.
struct CallState {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  std::shared_ptr<Meeting> meeting;
};

ffi::ErrorOr<std::unique_ptr<CallState>> MakeState(CallSpec spec);

template <Collective collective>
ffi::ErrorOr<std::unique_ptr<CallState>> Instantiate(ffi::Dictionary attributes) {
  ffi::ErrorOr<CallSpec> spec = DecodeCall(collective, attributes);
  if (!spec) return ffi::Unexpected(spec.error());
  return MakeState(*std::move(spec));
}

inline auto BindInstantiate() { return ffi::Ffi::BindInstantiate().Attrs(); }

// One operand, one result. The buffers stay valid until the future is completed; nothing else of the call frame does.
ffi::Future Execute(CallState* state, ffi::RunId run, ffi::Buffer<ffi::S32> rank, ffi::AnyBuffer x,
                    ffi::Result<ffi::AnyBuffer> y);

inline auto BindExecute() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::State<CallState>>()
      .Ctx<ffi::RunId>()
      .Arg<ffi::Buffer<ffi::S32>>()  // logical id of this device
      .Arg<ffi::AnyBuffer>()         // x
      .Ret<ffi::AnyBuffer>();        // y
}

// Takes part in the meeting; the future is the completion.
ffi::Future Arrive(Meeting& meeting, const Arrival& arrival);

ffi::Future Failed(const Status& error);

}  // namespace jaxcomm
