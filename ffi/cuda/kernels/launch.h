// Launches and loads the kernels.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/kernels/exchange_offsets.cuh"
#include "cuda/program/gin_args.h"
#include "cuda/program/inter_node_row_args.h"
#include "cuda/program/kernel_args.h"
#include "cuda/program/route_and_dispatch_args.h"
#include "cuda/program/row_args.h"
#include "cuda/program/slice_args.h"

struct ncclDevComm;

#ifndef JAXCOMM_GIN_NAMESPACE
#define JAXCOMM_GIN_NAMESPACE gin  // of the headers that the module as a whole is built with
#endif

namespace jaxcomm::cuda {

// Threads per thread block of LL and multimem calls.
constexpr int kThreads = 512;

// Launch the kernel of one rank with one thread block per channel. Do not wait for the kernel. May be captured into a
// CUDA graph. All channels must be resident at once on every rank, because a thread block waits for those of its peers.
cudaError_t Launch(const RankArgs& args, int32_t num_channels, cudaStream_t stream);
cudaError_t Launch(const LlArgs& args, cudaStream_t stream);
cudaError_t Launch(const MultimemArgs& args, cudaStream_t stream);
cudaError_t Launch(const ExchangeOffsetsArgs& args, cudaStream_t stream);
cudaError_t Launch(const RowArgs& args, cudaStream_t stream);
cudaError_t Launch(const SliceArgs& args, cudaStream_t stream);
cudaError_t Launch(const RouteAndDispatchArgs& args, cudaStream_t stream);

// Loads the kernel of Launch(const Args&) onto the current device now. Otherwise, a first launch might wait until the
// device is idle, which it never is while another kernel waits for a peer. `bulk`: the most stages that a launch will
// ask for.
template <typename Args>
cudaError_t Load(const BulkStages& bulk = {});

// The compute capability for which the kernels' code on the current device was compiled, times ten. An error if the
// module has no code for the device, nor PTX that the driver can compile for it. Initializes the device.
cudaError_t FindPtxVersion(int* version);

// The same for a group of several nodes that GIN connects. Compiled once for each version of NCCL's headers, in a
// namespace of its own: cuda/nccl/gin_version.h. `nccl_comm` is of that version. It must have NumGinSignals signals and
// NumGinCounters counters for at least as many channels as `network` has rows of counts.
namespace JAXCOMM_GIN_NAMESPACE {

cudaError_t LaunchGin(const RankArgs& args, const GinNetworkArgs& network, const ncclDevComm& nccl_comm,
                      int32_t num_channels, cudaStream_t stream);
cudaError_t LaunchInterNodeRows(const InterNodeRowArgs& args, const ncclDevComm& nccl_comm, cudaStream_t stream);
cudaError_t LoadGinKernel(const BulkStages& bulk);
cudaError_t LoadInterNodeRowKernels();

}  // namespace JAXCOMM_GIN_NAMESPACE
}  // namespace jaxcomm::cuda
