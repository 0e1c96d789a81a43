// Errors of the CUDA runtime as a Status.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "common/status.h"

namespace jaxcomm {
namespace cuda {

// `name`: the call that returned `result`, or the operation it belongs to.
inline Status CheckCuda(const std::string& name, cudaError_t result) {
  if (result == cudaSuccess) return OkStatus();
  cudaGetLastError();  // clears the error, which an unrelated later call would report
  std::string text = name + ": " + cudaGetErrorString(result);
  if (result == cudaErrorInsufficientDriver) {
    text += "; jaxcomm._cuda was built with CUDA " + std::to_string(CUDART_VERSION / 1000) + "." +
            std::to_string(CUDART_VERSION % 1000 / 10) + ": update the driver, or build with an older CUDA";
  } else if (result == cudaErrorNoKernelImageForDevice || result == cudaErrorUnsupportedPtxVersion) {
    text += "; jaxcomm._cuda has no code for this GPU: build with CMAKE_CUDA_ARCHITECTURES=native";
  }
  return UnavailableError(std::move(text));
}

}  // namespace cuda
}  // namespace jaxcomm
