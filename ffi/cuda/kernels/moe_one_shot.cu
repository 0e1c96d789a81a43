// The kernel of moe_one_shot.
#include "cuda/kernels/launch_moe_one_shot.h"
#include "cuda/kernels/moe_one_shot.cuh"

namespace jaxcomm {
namespace cuda {
namespace {

__global__ void __launch_bounds__(kMoeOneShotThreads, 1) RunMoeOneShot(const __grid_constant__ MoeOneShotArgs args) {
  MoeOneShotCall call(args, static_cast<int32_t>(blockIdx.x), device::DynamicShared());
  call.Run();
}

}  // namespace

cudaError_t LaunchMoeOneShot(const MoeOneShotArgs& args, cudaStream_t stream) {
  const auto shared_bytes = static_cast<size_t>(MoeOneShotSharedBytes(args));
  RunMoeOneShot<<<args.num_channels, kMoeOneShotThreads, shared_bytes, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LoadMoeOneShotKernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, RunMoeOneShot);
}

}  // namespace cuda
}  // namespace jaxcomm
