#include "cuda/runtime/abort_flag.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/wait_for_stream.h"

namespace jaxcomm {
namespace cuda {

StatusOr<uint64_t*> AbortFlag(int device, double timeout_s) {
  static std::mutex mutex;
  static auto* words = new std::map<int, uint64_t*>;
  std::lock_guard<std::mutex> lock(mutex);
  uint64_t*& word = (*words)[device];
  if (word != nullptr) return word;
  const uint64_t zero = 0;
  void* made = nullptr;
  cudaError_t status = cudaMalloc(&made, sizeof zero);
  // Not on the legacy default stream, which might wait for a kernel that waits for a peer.
  if (status == cudaSuccess) {
    status = cudaMemcpyAsync(made, &zero, sizeof zero, cudaMemcpyHostToDevice, cudaStreamPerThread);
  }
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("a word of GPU memory", status));
  JAXCOMM_RETURN_IF_ERROR(WaitForStream(cudaStreamPerThread, timeout_s, "the end of a copy to the GPU"));
  return word = static_cast<uint64_t*>(made);
}

}  // namespace cuda
}  // namespace jaxcomm
