// Memory of a GPU for virtual ranks.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "../../../ffi/cuda/kernels/launch.h"
#include "../fakes/virtual_ranks.h"

#define CHECK_CUDA(call)                                                                              \
  do {                                                                                                \
    const cudaError_t status = (call);                                                                \
    if (status != cudaSuccess) {                                                                      \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, cudaGetErrorString(status)); \
      std::exit(1);                                                                                   \
    }                                                                                                 \
  } while (false)

namespace jaxcomm {
namespace cuda {

class DeviceMemory : public Memory {
 public:
  explicit DeviceMemory(bool managed = false) : managed_(managed) {}
  ~DeviceMemory() override {
    for (void* block : blocks_) cudaFree(block);
  }
  char* Take(int64_t bytes) override {
    const size_t size = bytes > 0 ? bytes : 1;
    void* block = nullptr;
    CHECK_CUDA(managed_ ? cudaMallocManaged(&block, size) : cudaMalloc(&block, size));
    CHECK_CUDA(cudaMemset(block, 0, size));
    CHECK_CUDA(cudaDeviceSynchronize());
    blocks_.push_back(block);
    return static_cast<char*>(block);
  }
  void Write(void* to, const void* from, int64_t bytes) override {
    CHECK_CUDA(cudaMemcpy(to, from, bytes, cudaMemcpyDefault));
  }

 private:
  const bool managed_;
  std::vector<void*> blocks_;
};

// Memory that the host may access while no kernel runs.
struct ManagedMemory : DeviceMemory {
  ManagedMemory() : DeviceMemory(true) {}
};

// Call only while no kernel runs.
inline std::vector<device::Report> Reports(const VirtualRanks& ranks) {
  std::vector<device::Report> reports(ranks.n());
  CHECK_CUDA(
      cudaMemcpy(reports.data(), ranks.reports(), reports.size() * sizeof(device::Report), cudaMemcpyDeviceToHost));
  return reports;
}

// Copies the arguments of a rank into shared memory, where access costs about as much as to kernel parameters.
struct SharedArgs {
  RankArgs args;
  PeerNetworkArgs network;
};
__device__ inline const SharedArgs& TakeArgs(char* shared, const RankArgs* args, const PeerNetworkArgs* networks) {
  device::Copy(shared + offsetof(SharedArgs, args), args + blockIdx.y, sizeof(RankArgs));
  device::Copy(shared + offsetof(SharedArgs, network), networks + blockIdx.y, sizeof(PeerNetworkArgs));
  __syncthreads();
  return *reinterpret_cast<const SharedArgs*>(shared);
}

}  // namespace cuda
}  // namespace jaxcomm
