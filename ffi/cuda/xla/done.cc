// done: ends an asynchronous call. It does nothing, as on CPUs (handlers/done.cc). XLA waits for the asynchronous call
// right before the first user of its result. This call is a user that comes after the values in `after`. An
// optimization barrier would not be: XLA drops operands of a barrier whose results nobody uses.
#include "cuda/xla/call.h"

namespace jaxcomm {
namespace {

ffi::Error Done(ffi::AnyBuffer result, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> y) {
  if (y->untyped_data() == result.untyped_data()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("jaxcomm: done: the result must be aliased to the first operand");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(CudaDone, Done,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()    // result of the call
                                  .RemainingArgs()          // operand of the call, after
                                  .Ret<ffi::AnyBuffer>());  // y

}  // namespace jaxcomm
