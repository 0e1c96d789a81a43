#include "cuda/nccl/wait_for_stream.h"

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/deadline.h"
#include "cuda/program/call_program.h"

namespace jaxcomm {
namespace cuda {

bool WaitForStream(cudaStream_t stream, double timeout_s, const std::string& late, std::string* error) {
  const Deadline deadline(timeout_s);
  for (;;) {
    const cudaError_t status = cudaStreamQuery(stream);
    if (status != cudaErrorNotReady) return CheckCuda("cudaStreamQuery", status, error);
    if (deadline.Wait()) continue;
    *error = late + " did not come within " + TimeoutText(timeout_s);
    return false;
  }
}

}  // namespace cuda
}  // namespace jaxcomm
