#include "cuda/runtime/device_memory.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/wait_for_stream.h"
#include "cuda/program/assign_or_return.h"

namespace jaxcomm {
namespace cuda {
namespace {

struct Retired {
  std::mutex mutex;
  std::map<int32_t, std::vector<void*>> of_device;
};

Retired& GetRetired() {
  static auto* retired = new Retired;
  return *retired;
}

}  // namespace

StatusOr<char*> CopyToGpu(const void* data, size_t bytes, double timeout_s) {
  void* made = nullptr;
  JAXCOMM_RETURN_IF_ERROR(CheckCuda("cudaMalloc", cudaMalloc(&made, bytes)));
  // Not on the legacy default stream, which might wait for a kernel that waits for a peer.
  JAXCOMM_RETURN_IF_ERROR(
      CheckCuda("cudaMemcpyAsync", cudaMemcpyAsync(made, data, bytes, cudaMemcpyHostToDevice, cudaStreamPerThread)));
  JAXCOMM_RETURN_IF_ERROR(WaitForStream(cudaStreamPerThread, timeout_s, "the end of a copy to the GPU"));
  return static_cast<char*>(made);
}

StatusOr<uint64_t*> AbortFlag(int device, double timeout_s) {
  static std::mutex mutex;
  static auto* words = new std::map<int, uint64_t*>;
  std::lock_guard<std::mutex> lock(mutex);
  uint64_t*& word = (*words)[device];
  if (word != nullptr) return word;
  const uint64_t zero = 0;
  JAXCOMM_ASSIGN_OR_RETURN(char* const made, CopyToGpu(&zero, sizeof zero, timeout_s));
  return word = reinterpret_cast<uint64_t*>(made);
}

void Retire(int32_t device, void* memory) {
  std::lock_guard<std::mutex> lock(GetRetired().mutex);
  GetRetired().of_device[device].push_back(memory);
}

void FreeRetired(int32_t device) {
  std::vector<void*> memory;
  {
    std::lock_guard<std::mutex> lock(GetRetired().mutex);
    memory = std::exchange(GetRetired().of_device[device], {});
  }
  if (memory.empty()) return;
  ScopedDevice keep;
  cudaSetDevice(device);
  for (void* const block : memory) cudaFree(block);
  cudaGetLastError();
}

}  // namespace cuda
}  // namespace jaxcomm
