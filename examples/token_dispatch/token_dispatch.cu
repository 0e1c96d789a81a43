// The kernel's launch.
#include "token_dispatch.cuh"

namespace token_dispatch {

// Loads the kernel's code.
cudaError_t Load() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, Kernel);
}

// Launches the kernel of this rank. All ranks must launch it with the same number of blocks, which must be resident at
// once on every GPU, because they wait for each other. Does not wait for the kernel. May be captured into a CUDA graph.
cudaError_t Launch(const Args& args, int32_t blocks, cudaStream_t stream) {
  static_assert(kWarps * device::kWarpThreads == kThreads, "the arena has a channel per warp");
  Kernel<<<blocks, kThreads, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace token_dispatch
