// Starts the kernel of locate.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/locate.cuh"

namespace jaxcomm {
namespace cuda {

// As the executor's in launch.h.
cudaError_t LaunchLocate(const LocateArgs& args, cudaStream_t stream);
cudaError_t LoadLocate();

}  // namespace cuda
}  // namespace jaxcomm
