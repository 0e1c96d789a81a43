// The kernel of LL calls.
#include "cuda/kernels/call_kernel.cuh"
#include "cuda/kernels/ll.cuh"

namespace jaxcomm::cuda {

cudaError_t Launch(const LlArgs& args, cudaStream_t stream) { return LaunchCall<LlCall, kThreads>(args, stream); }

template <>
cudaError_t Load<LlArgs>(const BulkStages&) {
  return LoadKernel(RunCall<LlCall, kThreads, LlArgs>);
}

}  // namespace jaxcomm::cuda
