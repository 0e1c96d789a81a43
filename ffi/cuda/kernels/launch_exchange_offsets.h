// Starts the kernel of exchange_offsets.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/exchange_offsets.cuh"

namespace jaxcomm {
namespace cuda {

// As the executor's in launch.h.
cudaError_t LaunchExchangeOffsets(const ExchangeOffsetsArgs& args, cudaStream_t stream);
cudaError_t LoadExchangeOffsets();

}  // namespace cuda
}  // namespace jaxcomm
