// The executor's kernel for groups of several nodes that GIN connects. NCCL does not guarantee that the kernel works
// with a libnccl of another version than these headers.
#include <nccl_device.h>

#include "cuda/kernels/call_kernel.cuh"
#include "cuda/kernels/executor.cuh"
#include "cuda/kernels/gin_network.cuh"

namespace jaxcomm::cuda {
namespace {

// Fewer than kThreads, which would leave 128 registers per thread: with so few, NCCL's GIN spills some (CUDA 13.0,
// sm_80 to sm_120).
constexpr int kGinThreads = 384;

__global__ void __launch_bounds__(kGinThreads, 1)
    ExecutePlanGin(const __grid_constant__ RankArgs args, const __grid_constant__ GinNetworkArgs network_args,
                   const __grid_constant__ ncclDevComm nccl_comm) {
  GinNetwork network(network_args, nccl_comm);
  ChannelExecutor<GinNetwork> executor(args, network, static_cast<int32_t>(blockIdx.x), device::DynamicShared());
  executor.Run();
}

}  // namespace

namespace JAXCOMM_GIN_NAMESPACE {

cudaError_t LaunchGin(const RankArgs& args, const GinNetworkArgs& network, const ncclDevComm& nccl_comm,
                      int32_t num_channels, cudaStream_t stream) {
  ExecutePlanGin<<<num_channels, kGinThreads, BulkSharedBytes(args.bulk), stream>>>(args, network, nccl_comm);
  return cudaGetLastError();
}

cudaError_t LoadGinKernel(const BulkStages& bulk) { return LoadKernel(ExecutePlanGin, BulkSharedBytes(bulk)); }

}  // namespace JAXCOMM_GIN_NAMESPACE
}  // namespace jaxcomm::cuda
