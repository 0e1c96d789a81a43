// The kernel of all_to_all_v.
#include "cuda/kernels/launch.h"
#include "cuda/kernels/load_kernel.h"
#include "cuda/kernels/slices.cuh"

namespace jaxcomm {
namespace cuda {
namespace {

__global__ void __launch_bounds__(kSliceThreads, 1) ExchangeSlices(const __grid_constant__ SliceArgs args) {
  SliceCall call(args, static_cast<int32_t>(blockIdx.x), device::DynamicShared());
  call.Run();
}

}  // namespace

cudaError_t LaunchSlices(const SliceArgs& args, cudaStream_t stream) {
  ExchangeSlices<<<args.num_channels, kSliceThreads, SliceSharedBytes(kSliceThreads, args.bulk), stream>>>(args);
  return cudaGetLastError();
}

cudaError_t LoadSliceKernel(const BulkStages& bulk) {
  return Load(ExchangeSlices, SliceSharedBytes(kSliceThreads, bulk));
}

}  // namespace cuda
}  // namespace jaxcomm
