// Shared by the XLA handlers of all collectives: decodes FFI buffers and attributes, joins a Rendezvous, returns its
// completion as a future.
#pragma once

#include <memory>
#include <utility>

#include "common/attributes.h"
#include "common/status.h"
#include "cpu/rendezvous.h"

namespace jaxcomm {

// One per call site and executable, shared by the local devices. XLA creates it from the attributes before the first
// execution.
struct CpuCallState {
  static ffi::TypeId id;
  static ffi::TypeInfo info;
  std::shared_ptr<Rendezvous> rendezvous;
  bool numbered = false;  // CallSpec::numbered
};

ffi::ErrorOr<std::unique_ptr<CpuCallState>> MakeState(CallSpec spec);

template <Collective collective>
ffi::ErrorOr<std::unique_ptr<CpuCallState>> Instantiate(ffi::Dictionary attributes) {
  ffi::ErrorOr<CallSpec> spec = DecodeCall(collective, attributes);
  if (!spec) return ffi::Unexpected(spec.error());
  return MakeState(*std::move(spec));
}

inline auto BindInstantiate() { return ffi::Ffi::BindInstantiate().Attrs(); }

// The first arguments of every Execute. The buffer holds the logical id of this device.
inline auto BindCall() {
  return ffi::Ffi::Bind().Ctx<ffi::State<CpuCallState>>().Ctx<ffi::RunId>().Arg<ffi::Buffer<ffi::S32>>();
}

// One operand, one result. The buffers stay valid until the future is completed. The rest of the call frame does not.
// Operands in `after` only delay the call: XLA runs it when they have been computed. The first one of a numbered
// call has its number and that of the program among those of the call.
ffi::Future Execute(CpuCallState* state, ffi::RunId run, ffi::Buffer<ffi::S32> rank, ffi::AnyBuffer x,
                    ffi::RemainingArgs after, ffi::Result<ffi::AnyBuffer> y);

inline auto BindExecute() {
  return BindCall()
      .Arg<ffi::AnyBuffer>()   // x
      .RemainingArgs()         // after
      .Ret<ffi::AnyBuffer>();  // y
}

// A participant with one operand and one result.
Participant ParticipantOf(ffi::RunId run, ffi::Buffer<ffi::S32> rank, DType dtype, ffi::AnyBuffer x,
                          ffi::Result<ffi::AnyBuffer> y);

// Joins the rendezvous. The future completes when the call is done.
ffi::Future Arrive(Rendezvous& rendezvous, const Participant& participant);

// A future that has failed already.
ffi::Future Failed(const Status& error);

}  // namespace jaxcomm
