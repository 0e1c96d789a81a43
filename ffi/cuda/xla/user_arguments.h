// Hashes of the arguments of a user's call, which all ranks compare. Equal in all processes.
#pragma once

#include <cstdint>

#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

namespace ffi = ::xla::ffi;

namespace cuda {

// The types and shapes of operands and results.
uint64_t HashOf(ffi::RemainingArgs args, ffi::RemainingRets rets);
// The attributes, without those of jaxcomm's that are compared elsewhere or may differ.
uint64_t HashOf(const XLA_FFI_Attrs& attributes);

}  // namespace cuda
}  // namespace jaxcomm
