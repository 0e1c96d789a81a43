// What all collectives' XLA handlers share: from FFI buffers and attributes to a Meeting, and from there to a future.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "../cpu/meeting.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

namespace ffi = ::xla::ffi;

// One per call site and executable, shared by the local devices. XLA makes it from the attributes, before the first
// run.
struct CallState {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  std::shared_ptr<Meeting> meeting;
};

// The attribute `call` that every collective has, a dictionary; two arrays come beside it, since JAX takes arrays at
// the top level only.
using Groups = ffi::Span<const int64_t>;     // logical device ids, group after group
using Processes = ffi::Span<const int32_t>;  // of these devices; empty: all are of one process

struct CallAttributes {
  std::string_view op;         // public name, for messages
  std::string_view site;       // file and line of the call, for messages
  std::string_view algorithm;  // empty: choose
  int64_t group_size;
  int64_t ranks_per_node;
};

CallSpec MakeSpec(Collective collective, const CallAttributes& call, Groups groups, Processes processes);

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

ffi::Future Failed(const Error& error);

}  // namespace jaxcomm

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jaxcomm::CallAttributes, ::xla::ffi::StructMember<std::string_view>("op"),
                                      ::xla::ffi::StructMember<std::string_view>("site"),
                                      ::xla::ffi::StructMember<std::string_view>("algorithm"),
                                      ::xla::ffi::StructMember<int64_t>("group_size"),
                                      ::xla::ffi::StructMember<int64_t>("ranks_per_node"));
