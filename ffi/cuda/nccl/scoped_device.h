// Keeps the current CUDA device over a scope that changes it.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxcomm {

// Restores, at the end of the scope, the device that was current at its begin.
class ScopedDevice {
 public:
  ScopedDevice() { known_ = cudaGetDevice(&device_) == cudaSuccess; }
  ~ScopedDevice() {
    if (known_) cudaSetDevice(device_);
  }
  ScopedDevice(const ScopedDevice&) = delete;
  ScopedDevice& operator=(const ScopedDevice&) = delete;

 private:
  int device_ = 0;
  bool known_ = false;
};

}  // namespace jaxcomm
