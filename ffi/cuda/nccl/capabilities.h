// The properties that NCCL reports for a communicator over the GPUs of this process.
#pragma once

#include <vector>

#include "common/status.h"
#include "cuda/nccl/nccl_library.h"

namespace jaxcomm {

// Makes a communicator over `devices`, queries its properties, and destroys it. Takes seconds. An error after
// `limit_s`; NCCL goes on in its thread.
StatusOr<ncclCommProperties_t> QueryCommunicator(const NcclLibrary& nccl, const std::vector<int>& devices,
                                                 double limit_s = 120);

}  // namespace jaxcomm
