// GIN with NCCL's headers of one version. Kernels that use GIN work only with the libnccl of their headers' version, so
// the module may have them for several: JAXCOMM_NCCL_INCLUDE_DIR of CMake lists the folders of the headers.
#pragma once

#include <nccl.h>

#include <functional>
#include <memory>

#include "common/status.h"
#include "cuda/kernels/launch.h"

namespace jaxcomm::cuda {

// ncclDevComm is that of the version.
struct GinVersion {
  // Waits for the end of a call of NCCL and returns its outcome.
  using Check = std::function<Status(const char* name, ncclResult_t result)>;

  int nccl_version;
  const ncclDevComm* none;  // an argument for kernels of groups of one node, which use no GIN
  // Gin::Make. `create`: ncclDevCommCreate of the library.
  StatusOr<std::shared_ptr<const ncclDevComm>> (*make)(void* create, ncclComm_t nccl_comm, int32_t num_channels,
                                                       int32_t num_ranks, const Check& check);
  decltype(&JAXCOMM_GIN_NAMESPACE::LaunchGin) launch;
  decltype(&JAXCOMM_GIN_NAMESPACE::LaunchInterNodeRows) launch_rows;
  decltype(&JAXCOMM_GIN_NAMESPACE::LoadGinKernel) load;
  decltype(&JAXCOMM_GIN_NAMESPACE::LoadInterNodeRowKernels) load_rows;
};

}  // namespace jaxcomm::cuda
