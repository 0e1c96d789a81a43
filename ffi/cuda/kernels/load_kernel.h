// Loads kernels.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "plan/row_limits.h"

namespace jaxcomm {
namespace cuda {

// Loads a kernel onto the current device, for launches with up to `shared_bytes` of dynamic shared memory.
template <typename... Args>
cudaError_t Load(void (*kernel)(Args...), int64_t shared_bytes = 0) {
  if (shared_bytes > kMaxSharedBytes) {
    const cudaError_t allowed =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
    if (allowed != cudaSuccess) return allowed;
  }
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

}  // namespace cuda
}  // namespace jaxcomm
