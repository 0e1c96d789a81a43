// Launches the kernel of moe_one_shot.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include "cuda/program/moe_one_shot_args.h"

namespace jaxcomm {
namespace cuda {

// Like the functions for the executor in launch.h.
cudaError_t LaunchMoeOneShot(const MoeOneShotArgs& args, cudaStream_t stream);
cudaError_t LoadMoeOneShotKernel();

}  // namespace cuda
}  // namespace jaxcomm
