// Launches the kernels of rail_rows.cuh and rail_combine.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/program/rail_row_args.h"

struct ncclDevComm;

namespace jaxcomm {
namespace cuda {

// Like LaunchGin and LoadGinKernel in launch.h.
cudaError_t LaunchRailRows(const RailRowArgs& args, const ncclDevComm& nccl_comm, cudaStream_t stream);
cudaError_t LoadRailKernels();

}  // namespace cuda
}  // namespace jaxcomm
