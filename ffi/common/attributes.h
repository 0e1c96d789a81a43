// Decodes custom calls for all back ends: attributes to a CallSpec, XLA's element types to DType. The only header in
// common/ that includes XLA.
#pragma once

#include <optional>

#include "common/call_spec.h"
#include "common/dtype.h"
#include "xla/ffi/api/ffi.h"

namespace jaxcomm {

namespace ffi = ::xla::ffi;

// Decodes the attributes that call_spec.h lists. All but `processes`, `devices`, `asynchronous` and `number`
// are required.
ffi::ErrorOr<CallSpec> DecodeCall(Collective collective, const ffi::Dictionary& attributes);

// None if the type is not supported. The lowering has converted types of less than a byte (jaxcomm/_lowering.py).
std::optional<DType> FromFfi(ffi::DataType type);

}  // namespace jaxcomm
