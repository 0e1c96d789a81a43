// What a call of the CUDA runtime says.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace jaxcomm {
namespace cuda {

inline bool CheckCuda(const char* name, cudaError_t status, std::string* error) {
  if (status == cudaSuccess) return true;
  cudaGetLastError();  // or the next call of somebody else would report it
  *error = std::string(name) + ": " + cudaGetErrorString(status);
  return false;
}

}  // namespace cuda
}  // namespace jaxcomm
