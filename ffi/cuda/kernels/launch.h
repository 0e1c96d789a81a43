// Starts the executor's kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/executor.cuh"
#include "cuda/kernels/ll.cuh"
#include "cuda/kernels/multimem.cuh"
#include "cuda/program/gin_args.h"

struct ncclDevComm;

namespace jaxcomm {
namespace cuda {

// Threads of the block of a channel.
constexpr int kThreads = 512;

// One rank, a thread block per channel. Does not wait for the kernel; may be captured into a graph. All channels must
// be resident at once on every rank: a thread block waits for those of its peers.
cudaError_t Launch(const RankArgs& args, int32_t num_channels, cudaStream_t stream);
cudaError_t Launch(const LlArgs& args, cudaStream_t stream);
cudaError_t Launch(const MultimemArgs& args, cudaStream_t stream);

// Load the kernels onto the current device now. A first launch might wait until the device is idle, which it never is
// while another kernel waits for a peer.
cudaError_t LoadKernel();
cudaError_t LoadLlKernel();
cudaError_t LoadMultimemKernel();

// As these, for a group of several nodes. `nccl_comm` must have NumGinSignals and NumGinCounters for at least as many
// channels as counts are kept for, which are rows of `network`.
cudaError_t LaunchGin(const RankArgs& args, const GinNetworkArgs& network, const ncclDevComm& nccl_comm,
                      int32_t num_channels, cudaStream_t stream);
cudaError_t LoadGinKernel();

}  // namespace cuda
}  // namespace jaxcomm
