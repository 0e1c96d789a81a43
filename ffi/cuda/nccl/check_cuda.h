// What a call of the CUDA runtime says.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace jaxcomm {
namespace cuda {

// Empty if there is none.
inline std::string Problem(const std::string& name, cudaError_t status) {
  if (status == cudaSuccess) return "";
  cudaGetLastError();  // or the next call of somebody else would report it
  std::string text = name + ": " + cudaGetErrorString(status);
  if (status == cudaErrorInsufficientDriver) {
    text += "; jaxcomm._cuda was built with CUDA " + std::to_string(CUDART_VERSION / 1000) + "." +
            std::to_string(CUDART_VERSION % 1000 / 10) + ": update the driver, or build with an older CUDA";
  } else if (status == cudaErrorNoKernelImageForDevice || status == cudaErrorUnsupportedPtxVersion) {
    text += "; jaxcomm._cuda has no code for this GPU: build with CMAKE_CUDA_ARCHITECTURES=native";
  }
  return text;
}

inline bool CheckCuda(const char* name, cudaError_t status, std::string* error) {
  if (status == cudaSuccess) return true;
  *error = Problem(name, status);
  return false;
}

}  // namespace cuda
}  // namespace jaxcomm
