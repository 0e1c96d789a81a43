#include "cuda/runtime/retired_memory.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/nccl/check_cuda.h"

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
