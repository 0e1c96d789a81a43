// The kernel of dispatch and combine.
#include "cuda/kernels/call_kernel.cuh"
#include "cuda/kernels/rows.cuh"

namespace jaxcomm::cuda {

cudaError_t Launch(const RowArgs& args, cudaStream_t stream) {
  return LaunchCall<RowCall, kRowThreads>(args, stream, RowSharedBytes(args, kRowThreads));
}

template <>
cudaError_t Load<RowArgs>(const BulkStages&) {
  return LoadKernel(RunCall<RowCall, kRowThreads, RowArgs>);
}

}  // namespace jaxcomm::cuda
