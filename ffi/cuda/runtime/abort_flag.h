// The flag that all kernels of this process on one GPU check before they begin (device::Comm::abort_flag).
#pragma once

#include <cstdint>

#include "common/status.h"

namespace jaxcomm {
namespace cuda {

// The flag of `device`, which must be the current GPU. It lives as long as the process.
StatusOr<uint64_t*> AbortFlag(int device, double timeout_s);

}  // namespace cuda
}  // namespace jaxcomm
