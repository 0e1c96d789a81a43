// Small collectives among virtual ranks of one GPU: LL messages beside the plans that they stand for. Time is
// that of the kernel alone, per call, of many calls in one launch. A line of JSON per measurement.
//
//   bench_ll [launches]
#include <algorithm>
#include <cstdlib>

#include "../../ffi/plan/algorithms.h"
#include "../../tests/cuda/fakes/virtual_ll.h"
#include "../../tests/cuda/gpu/gpu.cuh"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int32_t kCallsOfALaunch = 200;

// The time of a call: the median over the launches.
double Microseconds(const MixedCall* call, int32_t num_channels, int32_t num_ranks, int launches) {
  cudaEvent_t begin, end;
  CHECK_CUDA(cudaEventCreate(&begin));
  CHECK_CUDA(cudaEventCreate(&end));
  int32_t one = 1, repetitions = kCallsOfALaunch;
  void* parameters[] = {&call, &one, &repetitions};
  std::vector<float> times;
  for (int i = -1; i < launches; ++i) {  // the first doesn't count
    CHECK_CUDA(cudaEventRecord(begin));
    CHECK_CUDA(
        cudaLaunchCooperativeKernel(RunCalls, dim3(num_channels, num_ranks), dim3(kThreads), parameters, 0, nullptr));
    CHECK_CUDA(cudaEventRecord(end));
    CHECK_CUDA(cudaEventSynchronize(end));
    float milliseconds = 0;
    CHECK_CUDA(cudaEventElapsedTime(&milliseconds, begin, end));
    if (i >= 0) times.push_back(milliseconds);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2] * 1e3 / kCallsOfALaunch;
}

void Measure(Collective collective, int32_t n, int64_t block_bytes, int launches) {
  const Operation operation{DType::kF32, ReduceOp::kSum};
  const int32_t num_channels = NumLlChannels(block_bytes, kLlChannels);
  DeviceMemory memory;
  const VirtualRanks ranks(memory, {1, n, true, true}, num_channels, 10'000'000'000);
  const VirtualSlots slots(memory, n, num_channels, kLlUnits);
  Choice choice(*FindAlgorithm(collective, "ll"), {});  // its plan
  choice.request.collective = collective;
  choice.request.geometry = {1, n, true, true};
  choice.request.block_count = block_bytes / 4;
  const LlBuffers ll = PrepareLl(memory, ranks, slots, choice.request, {}, operation, num_channels, 0);
  const VirtualRanks::Call planned =
      ranks.Prepare(memory, choice, choice.request.block_count, {}, operation, num_channels);
  const MixedCall* calls =
      memory.Upload(std::vector<MixedCall>{ll.call, {nullptr, planned.args, planned.network, planned.num_channels}});
  const double ll_us = Microseconds(calls, num_channels, n, launches);
  const double planned_us = Microseconds(calls + 1, num_channels, n, launches);
  for (const device::Report& report : Reports(ranks)) {
    if (report.state == device::Report::kNone) continue;
    std::fprintf(stderr, "%s: rank %d aborted\n", Name(collective), report.rank);
    std::exit(1);
  }
  std::printf(
      "{\"op\": \"%s\", \"ranks\": %d, \"block_bytes\": %lld, \"channels\": %d, \"ll_us\": %.2f, \"plan_us\": "
      "%.2f}\n",
      Name(collective), n, static_cast<long long>(block_bytes), num_channels, ll_us, planned_us);
  std::fflush(stdout);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm

int main(int argc, char** argv) {
  using namespace jaxcomm;
  const int launches = argc > 1 ? std::atoi(argv[1]) : 20;
  for (const Collective collective :
       {Collective::kAllReduce, Collective::kAllToAll, Collective::kAllGather, Collective::kReduceScatter}) {
    for (const int32_t n : {2, 8}) {
      for (const int64_t block_bytes : {8, 1 << 10, 8 << 10, 64 << 10}) {
        jaxcomm::cuda::Measure(collective, n, block_bytes, launches);
      }
    }
  }
  return 0;
}
