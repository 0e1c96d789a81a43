// Launches the kernels of watchdog.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/watchdog.cuh"

namespace jaxcomm {
namespace cuda {

// Launched before a round. If a kernel of this or another communicator has aborted, the data to send is undefined. The
// kernel then holds the stream until the host has begun to abort NCCL's communicator, at most for the timeout.
cudaError_t LaunchBegin(const device::Comm& comm, device::WatchdogState* state, uint64_t round, cudaStream_t stream);
// Launched after a round. If the host is aborting, the kernel sets the abort flag, so that no later kernel passes
// undefined data on to the node.
cudaError_t LaunchEnd(const device::Comm& comm, device::WatchdogState* state, cudaStream_t stream);
// Like LoadKernel.
cudaError_t LoadWatchdog();

}  // namespace cuda
}  // namespace jaxcomm
