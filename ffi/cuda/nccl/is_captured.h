// Whether a stream is being captured into a CUDA graph.
#pragma once

#include <cuda_runtime_api.h>

namespace jaxcomm {
namespace cuda {

// False also if CUDA reports no status.
inline bool IsCaptured(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) cudaGetLastError();
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace cuda
}  // namespace jaxcomm
