// Launches and loads kernels.
#pragma once

#include "cuda/kernels/launch.h"
#include "include/jaxcomm/device.h"
#include "plan/row_limits.h"

namespace jaxcomm::cuda {

// Loads a kernel onto the current device, for launches with up to `shared_bytes` of dynamic shared memory.
template <typename... Args>
cudaError_t LoadKernel(void (*kernel)(Args...), int64_t shared_bytes = 0) {
  if (shared_bytes > kMaxSharedBytes) {
    const cudaError_t allowed =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (allowed != cudaSuccess) return allowed;
  }
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

// The kernel of calls that are one Call(args, channel, shared memory) per thread block.
template <typename Call, int kNumThreads, typename Args>
__global__ void __launch_bounds__(kNumThreads, 1) RunCall(const __grid_constant__ Args args) {
  Call(args, static_cast<int32_t>(blockIdx.x), device::DynamicShared()).Run();
}

template <typename Call, int kNumThreads, typename Args>
cudaError_t LaunchCall(const Args& args, cudaStream_t stream, int64_t shared_bytes = 0) {
  RunCall<Call, kNumThreads><<<args.num_channels, kNumThreads, shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace jaxcomm::cuda
