// Launches the kernel of rows.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/program/row_args.h"

namespace jaxcomm {
namespace cuda {

// Like the functions for the executor in launch.h.
cudaError_t LaunchRows(const RowArgs& args, cudaStream_t stream);
cudaError_t LoadRowKernel();

}  // namespace cuda
}  // namespace jaxcomm
