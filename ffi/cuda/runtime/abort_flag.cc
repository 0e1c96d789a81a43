#include "cuda/runtime/abort_flag.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

#include "cuda/nccl/check_cuda.h"

namespace jaxcomm {
namespace cuda {

uint64_t* AbortFlag(int device, std::string* error) {
  static std::mutex mutex;
  static auto* words = new std::map<int, uint64_t*>;
  std::lock_guard<std::mutex> lock(mutex);
  uint64_t*& word = (*words)[device];
  if (word != nullptr) return word;
  const uint64_t zero = 0;
  void* made = nullptr;
  cudaError_t status = cudaMalloc(&made, sizeof zero);
  // Not the legacy default stream, which might wait for a kernel that waits for a peer.
  if (status == cudaSuccess) {
    status = cudaMemcpyAsync(made, &zero, sizeof zero, cudaMemcpyHostToDevice, cudaStreamPerThread);
  }
  if (status == cudaSuccess) status = cudaStreamSynchronize(cudaStreamPerThread);
  if (status == cudaSuccess) return word = static_cast<uint64_t*>(made);
  *error = Problem("a word of GPU memory", status);
  return nullptr;
}

}  // namespace cuda
}  // namespace jaxcomm
