// A custom call that only counts how often XLA calls it. It shows the cost of a call, and whether XLA replays CUDA
// graphs instead.
#include <atomic>
#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace ffi = xla::ffi;

namespace {

std::atomic<int64_t> calls{0};

ffi::Error Count(ffi::RemainingArgs, ffi::RemainingRets) {
  calls.fetch_add(1);
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(EmptyCall, Count, ffi::Ffi::Bind().RemainingArgs().RemainingRets(),
                              {ffi::Traits::kCmdBufferCompatible});

extern "C" int64_t EmptyCalls() { return calls.load(); }
