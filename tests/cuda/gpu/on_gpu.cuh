// The interface of emulated.h for a GPU. All ranks run in one cooperative launch, so that they are resident together.
// Alternatively, the production kernel runs with a stream per rank.
#pragma once

#include <algorithm>
#include <random>

#include "../../../ffi/cuda/kernels/executor.cu"  // ExecutePlan: kernels that share functions are compiled together
#include "../../check.h"
#include "../fakes/spoiling.h"
#include "gpu.cuh"

namespace jaxcomm {
namespace cuda {

using TestMemory = DeviceMemory;

// The inputs and outputs of every rank.
struct Data {
  std::vector<Bytes> inputs, outputs;  // by rank
};

inline bool a_stream_per_rank = false;

// blockIdx.y is the rank.
__global__ void __launch_bounds__(kThreads, 1)
    RunVirtualRanks(const RankArgs* args, const PeerNetworkArgs* networks, const Staged* staged) {
  __shared__ __align__(16) char shared[sizeof(SharedArgs)];
  const SharedArgs& own = TakeArgs(shared, args, networks);
  PeerNetwork network(own.network);
  FillExecuteSpoil(own.args, network, staged[blockIdx.y]);
}

// One thread block each, before and after the executor. The memory has the rank's data only in between.
__global__ void Fill(RankArgs args, Staged staged, int64_t input_bytes, int64_t output_bytes, uint64_t delay_ns) {
  char* const input = args.input.At(args.comm.local.rank);
  char* const output = args.output.At(args.comm.local.rank);
  for (int64_t i = threadIdx.x; i < input_bytes; i += blockDim.x) input[i] = staged.brought[i];
  for (int64_t i = threadIdx.x; i < output_bytes; i += blockDim.x) output[i] = kUnwritten;
  const uint64_t begin = device::NowNs();
  while (device::NowNs() - begin < delay_ns) {
  }
}
__global__ void TakeAndSpoil(RankArgs args, Staged staged, int64_t input_bytes, int64_t output_bytes) {
  char* const input = args.input.At(args.comm.local.rank);
  char* const output = args.output.At(args.comm.local.rank);
  for (int64_t i = threadIdx.x; i < output_bytes; i += blockDim.x) {
    staged.got[i] = output[i];
    output[i] = kSpoiled;
  }
  for (int64_t i = threadIdx.x; i < input_bytes; i += blockDim.x) input[i] = kSpoiled;
}

// Loads kernels that spin and kernels that must start beside them: a first launch may wait until the device is idle.
inline void PrepareDevice() {
  // Streams that share a connection wait for each other.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);
  CHECK_CUDA(Load<RankArgs>());
  cudaFuncAttributes attributes;
  CHECK_CUDA(cudaFuncGetAttributes(&attributes, RunVirtualRanks));
  CHECK_CUDA(cudaFuncGetAttributes(&attributes, Fill));
  CHECK_CUDA(cudaFuncGetAttributes(&attributes, TakeAndSpoil));
}

inline bool HasBulkCopies() {
  int device = 0, major = 0;
  CHECK_CUDA(cudaGetDevice(&device));
  CHECK_CUDA(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  return major >= 9;
}

// The inputs and outputs of the ranks in GPU memory, `turns` times.
class Staging {
 public:
  Staging(const Data& data, int turns)
      : input_bytes_(data.inputs[0].size()), output_bytes_(data.outputs[0].size()), num_ranks_(data.inputs.size()) {
    for (int turn = 0; turn < turns; ++turn) {
      for (const Bytes& input : data.inputs) all_.push_back({memory_.Upload(input), memory_.Take(output_bytes_)});
    }
  }
  const Staged& Of(int turn, size_t rank) const { return all_[turn * num_ranks_ + rank]; }
  const Staged* OnDevice() { return memory_.Upload(all_); }
  void Fetch(int turn, Data& data) const {
    for (size_t r = 0; r < num_ranks_; ++r) {
      CHECK_CUDA(cudaMemcpy(data.outputs[r].data(), Of(turn, r).got, output_bytes_, cudaMemcpyDeviceToHost));
    }
  }
  int64_t input_bytes() const { return static_cast<int64_t>(input_bytes_); }
  int64_t output_bytes() const { return static_cast<int64_t>(output_bytes_); }

 private:
  const size_t input_bytes_, output_bytes_, num_ranks_;
  DeviceMemory memory_;
  std::vector<Staged> all_;
};

// As in XLA, nothing waits on the host, and the next work on the stream uses the buffers at once. Ranks start three
// consecutive calls in a different order and after a different delay each time.
inline void RunOnStreams(const VirtualRanks::Call& call, Data& data, uint64_t seed) {
  constexpr int kTurns = 3;
  const size_t n = data.inputs.size();
  static auto* streams = new std::vector<cudaStream_t>;
  for (size_t r = streams->size(); r < n; ++r) {
    streams->emplace_back();
    CHECK_CUDA(cudaStreamCreateWithFlags(&streams->back(), cudaStreamNonBlocking));
  }
  Staging staging(data, kTurns);
  std::mt19937_64 random(seed);
  std::vector<size_t> order;
  for (size_t r = 0; r < n; ++r) order.push_back(r);
  for (int turn = 0; turn < kTurns; ++turn) {
    std::shuffle(order.begin(), order.end(), random);
    for (const size_t r : order) {
      const RankArgs& args = call.args_on_host[r];
      const Staged& staged = staging.Of(turn, r);
      Fill<<<1, 256, 0, (*streams)[r]>>>(args, staged, staging.input_bytes(), staging.output_bytes(),
                                         random() % 50'000);
      CHECK_CUDA(Launch(args, call.num_channels, (*streams)[r]));
      TakeAndSpoil<<<1, 256, 0, (*streams)[r]>>>(args, staged, staging.input_bytes(), staging.output_bytes());
      CHECK_CUDA(cudaGetLastError());
    }
  }
  CHECK_CUDA(cudaDeviceSynchronize());
  staging.Fetch(0, data);
  for (int turn = 1; turn < kTurns; ++turn) {
    Data other = data;
    staging.Fetch(turn, other);
    for (size_t r = 0; r < n; ++r) {
      if (other.outputs[r] != data.outputs[r]) data.outputs[r].clear();  // no result: at least one of them is wrong
    }
  }
}

// Same interface as the emulation, which needs only a few threads. The GPU determines the order.
struct TestNetwork {
  TestNetwork(const VirtualRanks&, int32_t, bool, uint64_t) {}

  static void Run(const VirtualRanks::Call& call, Data& data, unsigned threads, uint64_t seed) {
    if (a_stream_per_rank) return RunOnStreams(call, data, seed);
    Staging staging(data, 1);
    const dim3 grid(call.num_channels, static_cast<unsigned>(data.inputs.size()));
    const RankArgs* args = call.args;
    const PeerNetworkArgs* networks = call.network;
    const Staged* staged = staging.OnDevice();
    void* parameters[] = {&args, &networks, &staged};
    CHECK_CUDA(
        cudaLaunchCooperativeKernel(RunVirtualRanks, grid, dim3(threads * 16), parameters, call.shared_bytes, nullptr));
    CHECK_CUDA(cudaDeviceSynchronize());
    staging.Fetch(0, data);
  }
};

}  // namespace cuda
}  // namespace jaxcomm
