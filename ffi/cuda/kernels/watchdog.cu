// Kernels that show the host how far rounds between nodes have come.
#include "cuda/kernels/watchdog.h"

namespace jaxcomm {
namespace cuda {
namespace {

__global__ void BeginRoundKernel(const __grid_constant__ device::Comm comm, device::WatchdogState* state,
                                 uint64_t round) {
  BeginRound(comm, *state, round);
}

__global__ void EndRoundKernel(const __grid_constant__ device::Comm comm, device::WatchdogState* state) {
  EndRound(comm, *state);
}

}  // namespace

cudaError_t LaunchBegin(const device::Comm& comm, device::WatchdogState* state, uint64_t round, cudaStream_t stream) {
  BeginRoundKernel<<<1, 1, 0, stream>>>(comm, state, round);
  return cudaGetLastError();
}

cudaError_t LaunchEnd(const device::Comm& comm, device::WatchdogState* state, cudaStream_t stream) {
  EndRoundKernel<<<1, 1, 0, stream>>>(comm, state);
  return cudaGetLastError();
}

cudaError_t LoadWatchdog() {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, BeginRoundKernel);
  return status != cudaSuccess ? status : cudaFuncGetAttributes(&attributes, EndRoundKernel);
}

}  // namespace cuda
}  // namespace jaxcomm
