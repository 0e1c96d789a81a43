// Launches the executor's kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/executor.cuh"
#include "cuda/kernels/ll.cuh"
#include "cuda/kernels/multimem.cuh"
#include "cuda/program/gin_args.h"

struct ncclDevComm;

namespace jaxcomm {
namespace cuda {

// Threads per thread block.
constexpr int kThreads = 512;

// Launches the kernel of one rank with one thread block per channel. Does not wait for the kernel. May be captured into
// a CUDA graph. All channels must be resident at once on every rank, because a thread block waits for those of its
// peers.
cudaError_t Launch(const RankArgs& args, int32_t num_channels, cudaStream_t stream);
cudaError_t Launch(const LlArgs& args, cudaStream_t stream);
cudaError_t Launch(const MultimemArgs& args, cudaStream_t stream);

// Load the kernels onto the current device now. Otherwise, a first launch might wait until the device is idle, which it
// never is while another kernel waits for a peer. `bulk`: the most stages that a launch will ask for.
cudaError_t LoadKernel(const BulkStages& bulk);
// The compute capability for which the kernels' code on the current device was compiled, times ten.
cudaError_t FindPtxVersion(int* version);
cudaError_t LoadLlKernel();
cudaError_t LoadMultimemKernel();

// The same for a group of several nodes that GIN connects. `nccl_comm` must have NumGinSignals signals and
// NumGinCounters counters for at least as many channels as `network` has rows of counts.
cudaError_t LaunchGin(const RankArgs& args, const GinNetworkArgs& network, const ncclDevComm& nccl_comm,
                      int32_t num_channels, cudaStream_t stream);
cudaError_t LoadGinKernel(const BulkStages& bulk);

}  // namespace cuda
}  // namespace jaxcomm
