#include "cuda/nccl/device_memory.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/nccl/check_cuda.h"
#include "cuda/nccl/wait_for_stream.h"
#include "cuda/program/assign_or_return.h"

namespace jaxcomm::cuda {
namespace {

struct Block {
  void* memory;
  bool on_host;
};
struct Retired {
  std::mutex mutex;
  std::map<int32_t, std::vector<Block>> of_device;
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
  Status copied =
      CheckCuda("cudaMemcpyAsync", cudaMemcpyAsync(made, data, bytes, cudaMemcpyHostToDevice, cudaStreamPerThread));
  if (copied.ok()) copied = WaitForStream(cudaStreamPerThread, timeout_s, "the end of a copy to the GPU");
  if (copied.ok()) return static_cast<char*>(made);
  int device = 0;
  if (cudaGetDevice(&device) == cudaSuccess) Retire(device, made);  // the copy may go on
  return copied;
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

void Retire(int32_t device, void* memory, bool on_host) {
  std::lock_guard<std::mutex> lock(GetRetired().mutex);
  GetRetired().of_device[device].push_back({memory, on_host});
}

void FreeRetired(int32_t device) {
  std::vector<Block> blocks;
  {
    std::lock_guard<std::mutex> lock(GetRetired().mutex);
    blocks = std::exchange(GetRetired().of_device[device], {});
  }
  if (blocks.empty()) return;
  ScopedDevice keep;
  cudaSetDevice(device);
  for (const Block& block : blocks) {
    block.on_host ? cudaFreeHost(block.memory) : cudaFree(block.memory);
  }
  cudaGetLastError();
}

}  // namespace jaxcomm::cuda
