// The CUDA runtime: errors as a Status, the current device, and streams that are being captured.
#pragma once

#include <cuda_runtime_api.h>

#include <string>
#include <utility>

#include "common/status.h"

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

namespace cuda {

// `name`: the call that returned `result`, or the operation it belongs to.
inline Status CheckCuda(const std::string& name, cudaError_t result) {
  if (result == cudaSuccess) return OkStatus();
  cudaGetLastError();  // clears the error, which an unrelated later call would report
  std::string text = name + ": " + cudaGetErrorString(result);
  if (result == cudaErrorInsufficientDriver) {
    text += "; jaxcomm._cuda was built with CUDA " + std::to_string(CUDART_VERSION / 1000) + "." +
            std::to_string(CUDART_VERSION % 1000 / 10) + ": update the driver";
  } else if (result == cudaErrorNoKernelImageForDevice || result == cudaErrorUnsupportedPtxVersion) {
    text += "; jaxcomm._cuda has no code for this GPU: build with CMAKE_CUDA_ARCHITECTURES=native";
  }
  return UnavailableError(std::move(text));
}

// Whether a stream is being captured into a CUDA graph. False also if CUDA reports no status.
inline bool IsCaptured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) cudaGetLastError();
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace cuda
}  // namespace jaxcomm
