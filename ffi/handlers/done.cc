// done: ends an asynchronous call. The result of the call is aliased to the result of done. XLA keeps the operand of
// the call and the values in `after` until then, so that no computation beside the call reuses their memory.
#include <string>

#include "handlers/call.h"

namespace jaxcomm {
namespace {

ffi::Error ExecuteDone(ffi::AnyBuffer result, ffi::RemainingArgs, ffi::Result<ffi::AnyBuffer> y) {
  if (y->untyped_data() == result.untyped_data()) return ffi::Error::Success();
  return ffi::Error::InvalidArgument("jaxcomm: done: the result must be aliased to the first operand");
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(DoneExecute, ExecuteDone,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()    // result of the call
                                  .RemainingArgs()          // operand of the call, after
                                  .Ret<ffi::AnyBuffer>());  // y

}  // namespace jaxcomm
