// The executor's kernel.
#include "cuda/kernels/call_kernel.cuh"
#include "cuda/kernels/executor.cuh"

namespace jaxcomm::cuda {
namespace {

// Fewer than kThreads, which would leave 128 registers per thread: too few on sm_100 for the loads that reductions keep
// in flight (CUDA 13.0).
constexpr int kPlanThreads = 384;

__global__ void __launch_bounds__(kPlanThreads, 1) ExecutePlan(const __grid_constant__ RankArgs args) {
  NoNetwork network;
  ChannelExecutor<NoNetwork> executor(args, network, static_cast<int32_t>(blockIdx.x), device::DynamicShared());
  executor.Run();
}

}  // namespace

cudaError_t Launch(const RankArgs& args, int32_t num_channels, cudaStream_t stream) {
  ExecutePlan<<<num_channels, kPlanThreads, BulkSharedBytes(args.bulk), stream>>>(args);
  return cudaGetLastError();
}

template <>
cudaError_t Load<RankArgs>(const BulkStages& bulk) {
  return LoadKernel(ExecutePlan, BulkSharedBytes(bulk));
}

cudaError_t FindPtxVersion(int* version) {
  cudaFuncAttributes attributes;
  const cudaError_t status = cudaFuncGetAttributes(&attributes, ExecutePlan);
  if (status == cudaSuccess) *version = attributes.ptxVersion;
  return status;
}

}  // namespace jaxcomm::cuda
