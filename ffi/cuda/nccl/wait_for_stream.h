// A bounded wait for a CUDA stream.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>
#include <vector>

#include "common/status.h"

namespace jaxcomm::cuda {

// Waits until all work that was enqueued on `stream` has ended. `late`: the ranks that the work waits for; the error
// after a timeout names them. `processes`, if given: their failure ends the wait too, as FailureOf(*processes).
Status WaitForStream(cudaStream_t stream, double timeout_s, const std::string& late,
                     const std::vector<uint64_t>* processes = nullptr);

// The error after a timeout.
Status Late(const std::string& late, double timeout_s);

}  // namespace jaxcomm::cuda
