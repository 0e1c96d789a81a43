// The kernel of multimem calls.
#include "cuda/kernels/launch.h"
#include "cuda/kernels/load_kernel.h"
#include "cuda/kernels/multimem.cuh"

namespace jaxcomm {
namespace cuda {
namespace {

__global__ void __launch_bounds__(kThreads, 1) ExchangeMultimem(const __grid_constant__ MultimemArgs args) {
  MultimemCall call(args, static_cast<int32_t>(blockIdx.x));
  call.Run();
}

}  // namespace

cudaError_t Launch(const MultimemArgs& args, cudaStream_t stream) {
  ExchangeMultimem<<<args.num_channels, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LoadMultimemKernel() { return Load(ExchangeMultimem); }

}  // namespace cuda
}  // namespace jaxcomm
