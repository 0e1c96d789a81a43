// The kernel of multimem calls.
#include "cuda/kernels/call_kernel.cuh"
#include "cuda/kernels/multimem.cuh"

namespace jaxcomm::cuda {

cudaError_t Launch(const MultimemArgs& args, cudaStream_t stream) {
  return LaunchCall<MultimemCall, kThreads>(args, stream);
}

template <>
cudaError_t Load<MultimemArgs>(const BulkStages&) {
  return LoadKernel(RunCall<MultimemCall, kThreads, MultimemArgs>);
}

}  // namespace jaxcomm::cuda
