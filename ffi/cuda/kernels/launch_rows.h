// Launches the kernels of rows.cuh and slices.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/program/row_args.h"
#include "cuda/program/slice_args.h"

namespace jaxcomm {
namespace cuda {

// Like the functions for the executor in launch.h.
cudaError_t LaunchRows(const RowArgs& args, cudaStream_t stream);
cudaError_t LoadRowKernel();
cudaError_t LaunchSlices(const SliceArgs& args, cudaStream_t stream);
cudaError_t LoadSliceKernel(const BulkStages& bulk);

}  // namespace cuda
}  // namespace jaxcomm
