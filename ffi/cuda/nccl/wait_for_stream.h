// A bounded wait for a CUDA stream.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

namespace jaxcomm {
namespace cuda {

// Waits until all that has been put on `stream` has ended. False: `error` is filled in; after the timeout it names
// `late`, whom the stream waits for.
bool WaitForStream(cudaStream_t stream, double timeout_s, const std::string& late, std::string* error);

}  // namespace cuda
}  // namespace jaxcomm
