// The kernel of LL calls.
#include "cuda/kernels/launch.h"
#include "cuda/kernels/ll.cuh"
#include "cuda/kernels/load_kernel.h"

namespace jaxcomm {
namespace cuda {
namespace {

__global__ void __launch_bounds__(kThreads, 1) ExchangeLl(const __grid_constant__ LlArgs args) {
  LlCall call(args, static_cast<int32_t>(blockIdx.x));
  call.Run();
}

}  // namespace

cudaError_t Launch(const LlArgs& args, cudaStream_t stream) {
  ExchangeLl<<<args.num_channels, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LoadLlKernel() { return Load(ExchangeLl); }

}  // namespace cuda
}  // namespace jaxcomm
