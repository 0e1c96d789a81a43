// Changes the current device for a while.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxcomm {

// The device that is current now is so again at the end.
class KeepDevice {
 public:
  KeepDevice() { known_ = cudaGetDevice(&device_) == cudaSuccess; }
  ~KeepDevice() {
    if (known_) cudaSetDevice(device_);
  }
  KeepDevice(const KeepDevice&) = delete;
  KeepDevice& operator=(const KeepDevice&) = delete;

 private:
  int device_ = 0;
  bool known_ = false;
};

}  // namespace jaxcomm
