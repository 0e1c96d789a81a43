// The kernel of locate.cuh.
#include "cuda/kernels/launch_locate.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int kLocateThreads = 64;

__global__ void __launch_bounds__(kLocateThreads, 1) LocateBuffers(const __grid_constant__ LocateArgs args) {
  Locate(args);
}

}  // namespace

cudaError_t LaunchLocate(const LocateArgs& args, cudaStream_t stream) {
  LocateBuffers<<<1, kLocateThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LoadLocate() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, LocateBuffers);
}

}  // namespace cuda
}  // namespace jaxcomm
