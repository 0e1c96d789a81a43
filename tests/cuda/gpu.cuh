// Virtual ranks on a real GPU: one cooperative launch holds the thread blocks of all ranks, so that they are resident
// together.
#pragma once

#include <cuda_runtime.h>

#include <cstdio>
#include <cstdlib>

#include "../../ffi/cuda/launch.h"
#include "virtual_ranks.h"

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

// Memory of the GPU: its own, as XLA's, or managed, which the host may address while no kernel runs.
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

// blockIdx.y is the rank. Arguments in shared memory cost about what they do as parameters of a kernel.
__global__ void __launch_bounds__(kThreads, 1) WalkVirtualRanks(const RankArgs* args, const PeerNetworkArgs* networks) {
  __shared__ __align__(16) char own_args[sizeof(RankArgs)];
  __shared__ __align__(16) char own_network[sizeof(PeerNetworkArgs)];
  device::Copy(own_args, args + blockIdx.y, sizeof(RankArgs));
  device::Copy(own_network, networks + blockIdx.y, sizeof(PeerNetworkArgs));
  __syncthreads();
  PeerNetwork network(*reinterpret_cast<const PeerNetworkArgs*>(own_network));
  Walk<PeerNetwork> walk(*reinterpret_cast<const RankArgs*>(own_args), network, static_cast<int32_t>(blockIdx.x));
  walk.Run();
}

// Channels per rank that fit on this GPU at once.
inline int32_t MostChannels(int32_t num_ranks) {
  int device = 0, processors = 0, per_processor = 0;
  CHECK_CUDA(cudaGetDevice(&device));
  CHECK_CUDA(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  CHECK_CUDA(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_processor, WalkVirtualRanks, kThreads, 0));
  return processors * per_processor / num_ranks;
}

// Does not wait for the kernel.
inline void LaunchVirtualRanks(const VirtualRanks::Call& call, int threads, cudaStream_t stream) {
  const dim3 grid(call.num_channels, static_cast<unsigned>(call.inputs.size()));
  const RankArgs* args = call.args;
  const PeerNetworkArgs* networks = call.network;
  void* parameters[] = {&args, &networks};
  CHECK_CUDA(cudaLaunchCooperativeKernel(WalkVirtualRanks, grid, dim3(threads), parameters, 0, stream));
}

struct TestMemory : DeviceMemory {
  TestMemory() : DeviceMemory(true) {}
};

// What every rank brings and what it gets.
struct Data {
  std::vector<Bytes> inputs, outputs;  // by rank
};

// As that of the emulation, which has no use for more than a few threads. Order is up to the GPU.
struct TestNetwork {
  TestNetwork(const VirtualRanks&, int32_t, bool, uint64_t) {}

  static void Run(const VirtualRanks::Call& call, Data& data, unsigned threads, uint64_t) {
    for (size_t r = 0; r < data.inputs.size(); ++r) {
      std::memcpy(call.inputs[r], data.inputs[r].data(), data.inputs[r].size());
      std::memset(call.outputs[r], 0x5a, data.outputs[r].size());
    }
    LaunchVirtualRanks(call, static_cast<int>(threads) * 16, nullptr);
    CHECK_CUDA(cudaDeviceSynchronize());
    for (size_t r = 0; r < data.inputs.size(); ++r) {
      std::memcpy(data.outputs[r].data(), call.outputs[r], data.outputs[r].size());
    }
  }
};

}  // namespace cuda
}  // namespace jaxcomm
