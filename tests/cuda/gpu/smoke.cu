// The first program on a GPU: versions, one launch, then an all_reduce of 8 bytes in LL messages among 8 ranks, by the
// kernel of the module with a stream per rank. A line of JSON each.
#include <chrono>

#include "../../../ffi/plan/algorithms.h"
#include "../fakes/virtual_ll.h"
#include "gpu.cuh"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int32_t kRanks = 8, kTurns = 20;

__global__ void Nothing() {}

template <typename F>
double MicrosecondsOf(const F& launch) {
  const auto begin = std::chrono::steady_clock::now();
  launch();
  CHECK_CUDA(cudaDeviceSynchronize());
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count();
}

void LaunchOnce() {
  cudaDeviceProp properties;
  int driver = 0;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  CHECK_CUDA(cudaDriverGetVersion(&driver));
  const auto launch = [] {
    Nothing<<<1, 1>>>();
    CHECK_CUDA(cudaGetLastError());
  };
  launch();
  CHECK_CUDA(cudaDeviceSynchronize());
  std::printf(
      "{\"what\": \"launch\", \"device\": \"%s\", \"sms\": %d, \"driver_cuda\": %d, \"runtime_cuda\": %d, \"us\": "
      "%.1f}\n",
      properties.name, properties.multiProcessorCount, driver, CUDART_VERSION, MicrosecondsOf(launch));
}

// Whether all sums are right.
bool SumByLl() {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // streams that share a connection wait for each other
  CHECK_CUDA(LoadLlKernel());
  ManagedMemory memory;
  const VirtualRanks ranks(memory, {1, kRanks, true, true}, 1, 10'000'000'000);
  const VirtualSlots slots(memory, kRanks, 1, kLlUnits);
  Request request;
  request.collective = Collective::kAllReduce;
  request.geometry = {1, kRanks, true, true};
  request.block_count = 2;
  const LlBuffers ll = PrepareLl(memory, ranks, slots, request, {}, {DType::kF32, ReduceOp::kSum}, 1, 0);
  const std::vector<LlArgs> args(ll.args, ll.args + kRanks);
  cudaStream_t streams[kRanks];
  for (int32_t r = 0; r < kRanks; ++r) {
    CHECK_CUDA(cudaStreamCreateWithFlags(&streams[r], cudaStreamNonBlocking));
    reinterpret_cast<float*>(ll.inputs[r])[0] = static_cast<float>(r);
    reinterpret_cast<float*>(ll.inputs[r])[1] = 1;
  }
  const double us = MicrosecondsOf([&] {
    for (int turn = 0; turn < kTurns; ++turn) {
      for (int32_t r = 0; r < kRanks; ++r) CHECK_CUDA(cuda::Launch(args[r], streams[r]));
    }
  });
  int wrong = 0;
  for (int32_t r = 0; r < kRanks; ++r) {
    const float* const sum = reinterpret_cast<const float*>(ll.outputs[r]);
    wrong += sum[0] != kRanks * (kRanks - 1) / 2;
    wrong += sum[1] != kRanks;
  }
  for (const device::Report& report : Reports(ranks)) wrong += report.state != device::Report::kNone;
  std::printf("{\"what\": \"LL of 8 bytes\", \"ranks\": %d, \"wrong\": %d, \"us_with_launches\": %.1f}\n", kRanks,
              wrong, us / kTurns);
  return wrong == 0;
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm

int main() {
  jaxcomm::cuda::LaunchOnce();
  return jaxcomm::cuda::SumByLl() ? 0 : 1;
}
