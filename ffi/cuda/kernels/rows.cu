// The kernel of dispatch and combine.
#include "cuda/kernels/launch.h"
#include "cuda/kernels/load_kernel.h"
#include "cuda/kernels/rows.cuh"

namespace jaxcomm {
namespace cuda {
namespace {

__global__ void __launch_bounds__(kRowThreads, 1) ExchangeRows(const __grid_constant__ RowArgs args) {
  RowCall call(args, static_cast<int32_t>(blockIdx.x), device::DynamicShared());
  call.Run();
}

}  // namespace

cudaError_t LaunchRows(const RowArgs& args, cudaStream_t stream) {
  ExchangeRows<<<args.num_channels, kRowThreads, RowSharedBytes(args, kRowThreads), stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LoadRowKernel() { return Load(ExchangeRows); }

}  // namespace cuda
}  // namespace jaxcomm
