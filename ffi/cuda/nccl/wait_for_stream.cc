#include "cuda/nccl/wait_for_stream.h"

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/deadline.h"
#include "cuda/nccl/failed_processes.h"
#include "cuda/program/call_program.h"

namespace jaxcomm::cuda {

Status WaitForStream(cudaStream_t stream, double timeout_s, const std::string& late,
                     const std::vector<uint64_t>* processes) {
  const Deadline deadline(timeout_s);
  for (;;) {
    const cudaError_t result = cudaStreamQuery(stream);
    if (result != cudaErrorNotReady) return CheckCuda("cudaStreamQuery", result);
    if (processes != nullptr) JAXCOMM_RETURN_IF_ERROR(FailureOf(*processes));
    if (!deadline.Wait()) return Late(late, timeout_s);
  }
}

Status Late(const std::string& late, double timeout_s) {
  return DeadlineExceededError(late + " did not come within " + TimeoutText(timeout_s));
}

}  // namespace jaxcomm::cuda
