// The kernels of dispatch and combine between nodes that GIN connects. As executor_gin.cu, they need a libnccl of the
// version of these headers.
#include <nccl_device.h>

#include "cuda/kernels/call_kernel.cuh"
#include "cuda/kernels/rail_combine.cuh"
#include "cuda/kernels/rail_dispatch.cuh"
#include "include/jaxcomm/gin.h"

namespace jaxcomm::cuda {
namespace {

__global__ void __launch_bounds__(kRailThreads, 1)
    DispatchOnRails(const __grid_constant__ InterNodeRowArgs args, const __grid_constant__ ncclDevComm nccl_comm) {
  const device::Gin gin(args.gin, nccl_comm);
  RailDispatch<device::Gin>(args, gin, static_cast<int32_t>(blockIdx.x), device::DynamicShared()).Run();
}

__global__ void __launch_bounds__(kRailThreads, 1)
    CombineOnRails(const __grid_constant__ InterNodeRowArgs args, const __grid_constant__ ncclDevComm nccl_comm) {
  const device::Gin gin(args.gin, nccl_comm);
  RailCombine<device::Gin>(args, gin, static_cast<int32_t>(blockIdx.x), device::DynamicShared()).Run();
}

}  // namespace

namespace JAXCOMM_GIN_NAMESPACE {

cudaError_t LaunchInterNodeRows(const InterNodeRowArgs& args, const ncclDevComm& nccl_comm, cudaStream_t stream) {
  const int64_t shared_bytes = RailSharedBytes(args.rows, kRailThreads);
  auto* const kernel = args.rows.combines ? CombineOnRails : DispatchOnRails;
  kernel<<<args.rows.num_channels, kRailThreads, shared_bytes, stream>>>(args, nccl_comm);
  return cudaGetLastError();
}

cudaError_t LoadInterNodeRowKernels() {
  const cudaError_t dispatch = LoadKernel(DispatchOnRails);
  return dispatch != cudaSuccess ? dispatch : LoadKernel(CombineOnRails);
}

}  // namespace JAXCOMM_GIN_NAMESPACE
}  // namespace jaxcomm::cuda
