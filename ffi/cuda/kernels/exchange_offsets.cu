// The kernel of exchange_offsets.cuh.
#include "cuda/kernels/launch.h"
#include "cuda/kernels/load_kernel.h"

namespace jaxcomm {
namespace cuda {
namespace {

constexpr int kOffsetThreads = 64;

__global__ void __launch_bounds__(kOffsetThreads, 1) FindOffsets(const __grid_constant__ ExchangeOffsetsArgs args) {
  ExchangeOffsets(args);
}

}  // namespace

cudaError_t LaunchExchangeOffsets(const ExchangeOffsetsArgs& args, cudaStream_t stream) {
  FindOffsets<<<1, kOffsetThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LoadExchangeOffsets() { return Load(FindOffsets); }

}  // namespace cuda
}  // namespace jaxcomm
