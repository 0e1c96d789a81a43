// The kernel of dispatch between nodes that GIN connects. As executor_gin.cu, it needs a libnccl of the version of
// these headers.
#include <nccl_device.h>

#include "cuda/kernels/launch_rail_rows.h"
#include "cuda/kernels/rail_rows.cuh"
#include "include/jaxcomm/gin.h"

namespace jaxcomm {
namespace cuda {
namespace {

__global__ void __launch_bounds__(kRailThreads, 1)
    DispatchOnRails(const __grid_constant__ RailRowArgs args, const __grid_constant__ ncclDevComm nccl_comm) {
  const device::Gin gin(args.gin, nccl_comm);
  RailDispatch<device::Gin>(args, gin, static_cast<int32_t>(blockIdx.x), device::DynamicShared()).Run();
}

}  // namespace

cudaError_t LaunchRailDispatch(const RailRowArgs& args, const ncclDevComm& nccl_comm, cudaStream_t stream) {
  const int64_t shared_bytes = RailSharedBytes(args.rows, kRailThreads);
  DispatchOnRails<<<args.rows.num_channels, kRailThreads, shared_bytes, stream>>>(args, nccl_comm);
  return cudaGetLastError();
}

cudaError_t LoadRailDispatch() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, DispatchOnRails);
}

}  // namespace cuda
}  // namespace jaxcomm
