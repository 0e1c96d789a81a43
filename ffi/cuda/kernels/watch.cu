// Kernels that show the host how far rounds between nodes have come.
#include "cuda/kernels/watch.h"

namespace jaxcomm {
namespace cuda {
namespace {

__global__ void BeginRoundKernel(const __grid_constant__ device::Comm comm, device::Progress* progress,
                                 uint64_t round) {
  BeginRound(comm, *progress, round);
}

__global__ void EndRoundKernel(const __grid_constant__ device::Comm comm, device::Progress* progress) {
  EndRound(comm, *progress);
}

}  // namespace

cudaError_t LaunchBegin(const device::Comm& comm, device::Progress* progress, uint64_t round, cudaStream_t stream) {
  BeginRoundKernel<<<1, 1, 0, stream>>>(comm, progress, round);
  return cudaGetLastError();
}

cudaError_t LaunchEnd(const device::Comm& comm, device::Progress* progress, cudaStream_t stream) {
  EndRoundKernel<<<1, 1, 0, stream>>>(comm, progress);
  return cudaGetLastError();
}

cudaError_t LoadWatch() {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, BeginRoundKernel);
  return status != cudaSuccess ? status : cudaFuncGetAttributes(&attributes, EndRoundKernel);
}

}  // namespace cuda
}  // namespace jaxcomm
