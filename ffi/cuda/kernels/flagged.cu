// The kernel of flagged calls.
#include "cuda/kernels/launch.h"

namespace jaxcomm {
namespace cuda {
namespace {

__global__ void __launch_bounds__(kThreads, 1) ExchangeFlagged(const __grid_constant__ FlaggedArgs args) {
  FlaggedCall call(args, static_cast<int32_t>(blockIdx.x));
  call.Run();
}

}  // namespace

cudaError_t Launch(const FlaggedArgs& args, cudaStream_t stream) {
  ExchangeFlagged<<<args.num_channels, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LoadFlaggedKernel() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, ExchangeFlagged);
}

}  // namespace cuda
}  // namespace jaxcomm
