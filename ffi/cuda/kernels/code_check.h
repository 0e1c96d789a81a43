// Checks whether this module's kernels can run on a device.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxcomm {

// Returns cudaSuccess if the module holds code for the current device, or PTX that the driver can compile for it.
// Initializes the device.
cudaError_t CheckCode();

}  // namespace jaxcomm
