// The kernel of exchange_offsets.cuh.
#include "cuda/kernels/call_kernel.cuh"

namespace jaxcomm::cuda {
namespace {

constexpr int kOffsetThreads = 64;

__global__ void __launch_bounds__(kOffsetThreads, 1) FindOffsets(const __grid_constant__ ExchangeOffsetsArgs args) {
  ExchangeOffsets(args);
}

}  // namespace

cudaError_t Launch(const ExchangeOffsetsArgs& args, cudaStream_t stream) {
  FindOffsets<<<1, kOffsetThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

template <>
cudaError_t Load<ExchangeOffsetsArgs>(const BulkStages&) {
  return LoadKernel(FindOffsets);
}

}  // namespace jaxcomm::cuda
