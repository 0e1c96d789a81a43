// Starts the executor's kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "executor.cuh"

namespace jaxcomm {
namespace cuda {

// Threads of the block of a channel.
constexpr int kThreads = 512;

// One rank, a thread block per channel. Does not wait for the kernel; may be captured into a graph. All channels must
// be resident at once on every rank: a thread block waits for those of its peers.
cudaError_t Launch(const RankArgs& args, int32_t num_channels, cudaStream_t stream);

// Loads the kernel onto the current device now. Its first launch might wait until the device is idle, which it never
// is while another kernel waits for a peer.
cudaError_t LoadKernel();

}  // namespace cuda
}  // namespace jaxcomm
