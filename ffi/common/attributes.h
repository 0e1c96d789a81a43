// Decodes custom calls, for all back ends: attributes to a CallSpec, XLA's element types to ours. Nothing else in
// common/ includes XLA.
#pragma once

#include <optional>

#include "common/call_spec.h"
#include "common/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

namespace ffi = ::xla::ffi;

// The attributes that call_spec.h lists. All must be there but `processes`.
ffi::ErrorOr<CallSpec> DecodeCall(Collective collective, const ffi::Dictionary& attributes);

// Types of less than a byte arrive converted (jaxcomm/_lowering.py).
std::optional<DType> FromFfi(ffi::DataType type);

}  // namespace jaxcomm
