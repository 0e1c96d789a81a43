// Whether this module's kernels can run on a device.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxcomm {

// cudaSuccess if the module holds code for the current device, or PTX that its driver can compile. Starts the device.
cudaError_t CheckCode();

}  // namespace jaxcomm
