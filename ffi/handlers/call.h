// What all collectives' XLA handlers share: from FFI buffers and attributes to a Meeting, and from there to a future.
#pragma once

#include <memory>

#include "../common/status.h"
#include "../cpu/meeting.h"
#include "attributes.h"

namespace jaxcomm {

// One per call site and executable, shared by the local devices. XLA makes it from the attributes, before the first
// run.
struct CallState {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  std::shared_ptr<Meeting> meeting;
};

// Of the stage Instantiate; further attributes follow.
inline auto BindCall() {
  return ffi::Ffi::BindInstantiate().Attr<CallAttributes>("call").Attr<Groups>("groups").Attr<Processes>("processes");
}

ffi::ErrorOr<std::unique_ptr<CallState>> MakeState(CallSpec spec);

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
