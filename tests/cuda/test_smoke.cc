// The first program on a GPU: versions, one launch, then sums of 8 bytes in LL messages among 8 ranks with a stream
// each. The kernel is of this file, so that the program compiles in seconds. Emulated, or compiled by nvcc for a GPU. A
// line of JSON for each result.
#include <chrono>
#include <cstdio>
#include <vector>

#include "../../ffi/include/jaxcomm/ll.h"
#include "../check.h"
#if defined(__CUDACC__)
#include "gpu/gpu.cuh"
#else
#include "fakes/emulated.h"
#endif
#include "fakes/node_group.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int32_t kRanks = 8, kTurns = 20;

// y: the sum of the x of all ranks. Called by all threads of a block.
JAXCOMM_DEVICE void SumByLl(const device::Comm& comm, uint64_t x, uint64_t* y) {
  device::LlExchange exchange;
  if (!device::BeginLlExchange(comm, 0, &exchange)) return;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  if (thread < kRanks && thread != comm.local.rank) device::SendUnit(comm, exchange, thread, 0, x);
  bool received = true;
  uint64_t sum = x;
  for (int32_t peer = 0; peer < kRanks && received && thread == 0; ++peer) {
    uint64_t payload = 0;
    if (peer == comm.local.rank) continue;
    received = device::ReceiveUnits<1>(comm, exchange, 1, [&](int) { return device::LlUnit{peer, 0}; }, &payload);
    sum += payload;
  }
  if (device::EndLlExchange(comm, exchange, received) && thread == 0) *y = sum;
}

#if defined(__CUDACC__)
using TestMemory = ManagedMemory;

__global__ void Nothing() {}
__global__ void Sum(const __grid_constant__ device::Comm comm, uint64_t x, uint64_t* y) { SumByLl(comm, x, y); }

// As in a program, nothing waits on the host between the launches.
void SumAll(const std::vector<device::Comm>& comms, const std::vector<uint64_t*>& y) {
  cudaStream_t streams[kRanks];
  for (cudaStream_t& stream : streams) CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  for (int turn = 0; turn < kTurns; ++turn) {
    for (size_t r = 0; r < kRanks; ++r) Sum<<<1, 32, 0, streams[r]>>>(comms[r], 1 << r, y[r] + turn);
    CHECK_CUDA(cudaGetLastError());
  }
  CHECK_CUDA(cudaDeviceSynchronize());
}

TEST_CASE("versions and one launch") {
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 1);  // streams that share a connection wait for each other
  cudaDeviceProp properties;
  int driver = 0;
  CHECK_CUDA(cudaGetDeviceProperties(&properties, 0));
  CHECK_CUDA(cudaDriverGetVersion(&driver));
  for (const auto& load : {reinterpret_cast<const void*>(&Sum), reinterpret_cast<const void*>(&Nothing)}) {
    cudaFuncAttributes attributes;
    CHECK_CUDA(cudaFuncGetAttributes(&attributes, load));  // a first launch may wait until the device is idle
  }
  Nothing<<<1, 1>>>();
  CHECK_CUDA(cudaGetLastError());
  CHECK_CUDA(cudaDeviceSynchronize());
  std::printf("{\"what\": \"launch\", \"device\": \"%s\", \"sms\": %d, \"driver_cuda\": %d, \"runtime_cuda\": %d}\n",
              properties.name, properties.multiProcessorCount, driver, CUDART_VERSION);
}
#else
void SumAll(const std::vector<device::Comm>& comms, const std::vector<uint64_t*>& y) {
  for (int turn = 0; turn < kTurns; ++turn) {
    const auto run = [&] { SumByLl(comms[blockIdx.y], 1 << blockIdx.y, y[blockIdx.y] + turn); };
    emulation::Launch(1, kRanks, kRanks, static_cast<uint64_t>(turn), run);
  }
}
#endif

TEST_CASE("LL of 8 bytes") {
  NodeGroupIn<TestMemory> group(kRanks, 1, 10'000'000'000, 0, 1);
  std::vector<device::Comm> comms;
  std::vector<uint64_t*> y;
  for (int32_t r = 0; r < kRanks; ++r) {
    comms.push_back(group.CommOf(r));
    y.push_back(group.memory.Upload(std::vector<uint64_t>(kTurns)));
  }
  const auto begin = std::chrono::steady_clock::now();
  SumAll(comms, y);
  const double us =
      std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin).count() / kTurns;
  for (const device::Report& report : Reports(group.ranks)) CHECK(report.state == device::Report::kNone);
  for (const uint64_t* const sums : y) {
    for (int turn = 0; turn < kTurns; ++turn) CHECK(sums[turn] == (1 << kRanks) - 1);
  }
  std::printf("{\"what\": \"LL of 8 bytes\", \"ranks\": %d, \"us_with_launches\": %.1f}\n", kRanks, us);
}

}  // namespace
}  // namespace cuda
}  // namespace jaxcomm
