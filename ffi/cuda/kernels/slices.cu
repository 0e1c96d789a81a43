// The kernel of all_to_all_v.
#include "cuda/kernels/call_kernel.cuh"
#include "cuda/kernels/slices.cuh"

namespace jaxcomm::cuda {

cudaError_t Launch(const SliceArgs& args, cudaStream_t stream) {
  return LaunchCall<SliceCall, kSliceThreads>(args, stream, SliceSharedBytes(kSliceThreads, args.bulk));
}

template <>
cudaError_t Load<SliceArgs>(const BulkStages& bulk) {
  return LoadKernel(RunCall<SliceCall, kSliceThreads, SliceArgs>, SliceSharedBytes(kSliceThreads, bulk));
}

}  // namespace jaxcomm::cuda
