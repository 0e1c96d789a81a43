// Changes the current device for a while.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxcomm {

// The device that is current now is so again at the end.
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
