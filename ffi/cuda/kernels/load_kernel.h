// Loads kernels that may be launched with much shared memory.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace jaxcomm {
namespace cuda {

// Loads a kernel onto the current device, for launches with up to `shared_bytes` of dynamic shared memory.
template <typename... Args>
cudaError_t LoadWithShared(void (*kernel)(Args...), int64_t shared_bytes) {
  constexpr int64_t kWithoutLeave = 48 << 10;  // CUDA C++ Programming Guide, "Shared Memory"
  if (shared_bytes > kWithoutLeave) {
    const cudaError_t allowed =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (allowed != cudaSuccess) return allowed;
  }
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

}  // namespace cuda
}  // namespace jaxcomm
